"""Errors can be told to anyone, whatever they name."""

from __future__ import annotations

import os

import pytest

from rota.errors import CLASSES, RejectError, RotaError, class_name

KEY = "layers.0.\ud800.lora_A"  # what JSON makes of an escape that stands alone
NAME = os.fsdecode(b"adapter-\xff")  # a file name that is not UTF-8


@pytest.mark.parametrize("kind", [RotaError, RejectError])
@pytest.mark.parametrize("text", [KEY, NAME])
def test_lone_surrogates_are_spelled_out(kind: type[RotaError], text: str) -> None:
    error = kind(f"no {text}", code="a-code", subject=text, expected=text, found=[text])
    for said in (str(error), error.message, error.subject, error.expected, error.found):
        assert said is not None
        assert r"\ud" in said and said.encode().decode() == said


def test_other_text_stays_as_it_is() -> None:
    error = RotaError("größer", subject="名", expected="é", found=7)
    assert (error.message, error.subject, error.expected, error.found) == ("größer", "名", "é", "7")


def test_every_class_has_a_name_as_data() -> None:
    """One a subclass shares with the nearest class above it, so that no kind is lost on a wire."""
    direct = [cls for cls in RotaError.__subclasses__() if cls.__module__ == RotaError.__module__]
    assert sorted(CLASSES.values(), key=str) == sorted(direct, key=str)
    assert [class_name(cls("no")) for cls in CLASSES.values()] == list(CLASSES)

    class Special(RejectError):
        """A kind of refusal nobody else knows."""

    assert (class_name(Special("no")), class_name(RotaError("no"))) == ("reject", "internal")
