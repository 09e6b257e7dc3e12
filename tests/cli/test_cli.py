"""The command line as a caller sees it: exit codes, codes in the text, JSON that parses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rota.errors import CommandError
from rota.sched.cli import main
from rota.sched.demo.show import _newest

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests" / "data" / "oracle" / "llama"


def inspect(capsys: Any, adapter: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", str(adapter), "--model", str(LLAMA / "base"), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_accepts_with_a_report(capsys: Any) -> None:
    code, report = inspect(capsys, LLAMA / "adapters" / "attn_mlp_r8")
    assert code == 0 and report["accepted"] and report["ranks"] == [[8, 14]]
    assert len(report["delta_norm_per_layer"]) == 2 and len(report["digest"]) == 64


def test_inspect_refuses_with_the_exact_code(capsys: Any) -> None:
    code, report = inspect(capsys, LLAMA / "adapters" / "rslora_r16_bf16", "--max-lora-rank", "8")
    assert code == 1 and report["code"] == "REJECT[rank-exceeds-pool]"
    assert "8" in report["expected"] and "16" in report["found"]


def test_inspect_of_nothing_is_unreadable(capsys: Any, tmp_path: Path) -> None:
    code, report = inspect(capsys, tmp_path / "absent")
    assert code == 2 and not report["accepted"]


def test_the_table_shows_codes_and_shapes_in_full(capsys: Any) -> None:
    model = str(LLAMA / "base")
    other = ROOT / "examples" / "adapters" / "pirate"
    assert main(["inspect", str(other), "--model", model]) == 1
    assert "REJECT[" in capsys.readouterr().out


def test_a_refusal_names_its_code_on_stderr(capsys: Any, tmp_path: Path) -> None:
    assert main(["peer", str(tmp_path / "absent")]) == 1
    assert "refused [not-a-directory]" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_judges_nobody(capsys: Any, tmp_path: Path) -> None:
    adapter = str(LLAMA / "adapters" / "attn_mlp_r8")
    assert main(["inspect", adapter, "--model", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "unreadable-config"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--port", "99999"], "bad-option"),
        (["--connections", "0"], "bad-option"),
        (["--budget-gb", "-1"], "bad-option"),
        (["--budget-gb", "nan"], "bad-option"),
        (["--secret-file", "absent"], "bad-secret-file"),
        (["--host", "192.0.2.1", "--no-rdma"], "cannot-listen"),
    ],
)
def test_a_peer_that_cannot_start_says_why(words: list[str], code: str, capsys: Any) -> None:
    assert main(["peer", str(LLAMA / "adapters" / "attn_mlp_r8"), *words]) == 1
    assert f"refused [{code}]" in capsys.readouterr().err


def test_a_verbs_device_that_is_named_must_be_there(capsys: Any) -> None:
    """By no verbs at all, or none of that name; without a name it would serve by TCP."""
    adapter = str(LLAMA / "adapters" / "attn_mlp_r8")
    assert main(["peer", adapter, "--rdma-device", "no-such-device0"]) == 1
    assert re.search(r"refused \[(no-verbs-device|verbs-unavailable)\]", capsys.readouterr().err)
    serve = ["serve", str(LLAMA / "base"), "--peer-rdma-devices", "no-such-device0"]
    assert main([*serve, "--peer-arena-bytes", "1048576"]) == 1
    assert re.search(r"refused \[(no-verbs-device|verbs-unavailable)\]", capsys.readouterr().err)
    assert main(serve) == 1
    assert "refused [bad-verbs-devices]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--speed", "0"],
        ["--slots", "-3"],
        ["--limit", "-1"],
        ["--alpha", "nan"],
        ["--story", "/no/such/directory/story"],
    ],
)
def test_a_replay_that_cannot_run_says_why(words: list[str], capsys: Any) -> None:
    trace = ROOT / "tests" / "data" / "traces" / "azure2023_conv_head2000.csv"
    assert main(["replay", str(trace), *words]) == 1
    assert "refused: [bad-option]" in capsys.readouterr().out


def test_a_message_leaves_out_what_it_has_not() -> None:
    assert str(CommandError("no", expected=1)) == "[command-refused] no; expected 1"
    assert str(CommandError("no", found=2)) == "[command-refused] no; found 2"
    assert str(CommandError("no", expected=1, found=2)).endswith("no; expected 1, found 2")


@pytest.mark.parametrize(
    "command",
    ["serve", "inspect", "peer", "top", "bench", "demo", "fetch-demo-model", "completion"],
)
def test_every_command_explains_itself(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and "usage: rota" in capsys.readouterr().out


def test_replay_explains_itself_and_reads_a_public_trace(capsys: Any) -> None:
    assert main(["replay", "--help"]) == 0
    assert "usage:" in capsys.readouterr().out
    assert main(["replay", "absent-file"]) != 0


def test_the_table_of_an_accepted_adapter_is_for_people(capsys: Any) -> None:
    adapter = LLAMA / "adapters" / "attn_mlp_r8"
    assert main(["inspect", str(adapter), "--model", str(LLAMA / "base")]) == 0
    shown = capsys.readouterr().out
    assert "slot bytes" in shown and " kB" in shown and "down_proj" in shown
    assert not any(mark in shown for mark in "{}[]'")


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("rota 0.")


def test_a_panel_of_the_demo_shows_the_newest_lines() -> None:
    text = "\n".join(f"line {n}" for n in range(20)) + "\n" + "word " * 20
    shown = _newest(text).split("\n")
    assert len(shown) == 7 and max(map(len, shown)) <= 34
    assert shown[-1].endswith("word") and "line 19" in shown and "line 0" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("inspect", "max-loras", "control-rate"))
    tool = shutil.which(shell)
    if tool is not None:  # the shell itself finds no fault in it
        subprocess.run([tool, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("rota in", {"inspect"}),
        ("rota re", {"replay"}),
        ("rota serve --max-lo", {"--max-loras", "--max-lora-rank"}),
        ("rota serve model --lora-", {"--lora-adapter", "--lora-stageable"}),
        ("rota inspect --pl", {"--plot"}),
        ("rota replay --ag", {"--against"}),
        ("rota replay --against ", {"core", "sim", "real"}),
        ("rota completion z", {"zsh"}),
        ("rota serve --dtype ", {"auto", "bfloat16", "float32"}),
        ("rota serve model --device c", {"cpu", "cuda"}),
        ("rota serve --log-level w", {"warning"}),
        ("rota serve --http ", {"true", "false"}),
        ("rota top --max-loras", set()),
    ],
)
def test_the_tab_key_offers_what_fits(typed: str, offered: set[str], capsys: Any) -> None:
    """As bash asks for it: the words so far, and which of them is being typed."""
    assert main(["completion", "bash"]) == 0
    words = typed.split(" ")
    ask = (
        f"COMP_WORDS=({' '.join(repr(word) for word in words)})\nCOMP_CWORD={len(words) - 1}\n"
        '_shtab_rota\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    script = capsys.readouterr().out + ask
    command = ["bash", "--norc", "--noprofile"]
    done = subprocess.run(command, input=script, text=True, capture_output=True, check=True)
    assert set(done.stdout.split()) == offered, done.stderr
