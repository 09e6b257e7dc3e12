"""Errors can be told to anyone, whatever they name."""

from __future__ import annotations

import os

import pytest

from rota.errors import RejectError, RotaError

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
