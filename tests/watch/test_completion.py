"""Completions in the shells themselves; one that is not installed is left out, by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.__main__ import main

pytestmark = pytest.mark.fast


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(shell), reason=f"no {shell}: `apt install {shell}`")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without settings, and a command of the name: shells look for it before they complete its flags."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "phalanx").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "phalanx").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def completion(shell: str, capsys: Any) -> str:
    assert main(["completion", shell]) == 0
    text: str = capsys.readouterr().out
    return text


@needs("fish")
def test_fish_completes_commands_and_their_flags(home: Path, capsys: Any) -> None:
    folder = home / "config" / "fish" / "completions"
    folder.mkdir(parents=True)
    (folder / "phalanx.fish").write_text(completion("fish", capsys))  # where docs/watch-commands.md puts it

    def found(typed: str) -> list[str]:
        done = subprocess.run(
            ["fish", "-c", f"complete -C '{typed}'"], capture_output=True, text=True, timeout=60, check=True
        )
        return [line.partition("\t")[0] for line in done.stdout.splitlines()]

    assert found("phalanx stat") == ["status"]
    assert found("phalanx run --on-f") == ["--on-failure"]
    assert found("phalanx scale --np") == ["--nproc"]
    assert found("phalanx scale --on-f") == []


@needs("zsh")
def test_zsh_completes_commands_and_their_flags(home: Path, capsys: Any) -> None:
    """In a pseudo terminal, by the tabulator; a key of our own writes down what then stands on the line."""
    (home / "_phalanx").write_text(completion("zsh", capsys))
    (home / ".zshrc").write_text(
        f"PROMPT=; fpath=({home} $fpath); autoload -Uz compinit; compinit -u -d {home}/dump\n"
        f"show() {{ print -r -- \"$BUFFER\" > {home}/new; mv {home}/new {home}/line; BUFFER='' }}\n"
        f"zle -N show; bindkey '^T' show; touch {home}/ready\n"
    )
    ours, theirs = os.openpty()
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "ZDOTDIR": str(home), "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    reader = threading.Thread(target=read_all, args=(ours,), daemon=True)
    reader.start()
    try:
        wait_for(home / "ready", shell)
        for typed, expected in (
            ("phalanx stat", "phalanx status "),
            ("phalanx run --on-f", "phalanx run --on-failure "),
            ("phalanx scale --npr", "phalanx scale --nproc "),
            ("phalanx scale --on-f", "phalanx scale --on-f"),
        ):
            os.write(ours, f"{typed}\t\x14".encode())
            wait_for(home / "line", shell)
            assert (home / "line").read_text() == expected + "\n"
            (home / "line").unlink()
    finally:
        shell.kill()
        shell.wait()
        reader.join(60)
        os.close(ours)


def read_all(terminal: int) -> None:
    """A terminal that nobody reads takes some thousand bytes, and then no more."""
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:
        return


def wait_for(path: Path, shell: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert shell.poll() is None, "the shell has ended"
        assert time.monotonic() < deadline, f"no {path.name} in 60 s"
        time.sleep(0.02)
