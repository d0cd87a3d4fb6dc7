"""The extension's file is looked at before the system's loader maps it: a file that was cut short would kill the process."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path

import pytest

from torch_autokern.runtime import extension


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the extension, in the original's place."""
    path = tmp_path / "_C.so"
    path.write_bytes(Path(str(extension.extension().__file__)).read_bytes())
    spec = ModuleSpec("torch_autokern._C", ExtensionFileLoader("torch_autokern._C", str(path)), origin=str(path))
    spec.has_location = True
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    return path


def test_a_whole_file_passes(copy: Path) -> None:
    extension._check_whole()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.9999])
def test_a_file_cut_anywhere_behind_its_header_is_refused(copy: Path, share: float) -> None:
    body = copy.read_bytes()
    copy.write_bytes(body[: int(len(body) * share)])
    with pytest.raises(ImportError, match="cut short"):
        extension._check_whole()
    extension.extension_state.cache_clear()
    try:
        state = extension.extension_state()
    finally:
        extension.extension_state.cache_clear()
    assert state.module is None and "cut short" in state.reason


@pytest.mark.parametrize("body", [b"", b"\x7fELF", b"text " * 100])
def test_what_is_no_library_at_all_is_left_to_the_loader(copy: Path, body: bytes) -> None:
    copy.write_bytes(body)
    extension._check_whole()


def test_a_module_that_is_no_library_is_not_looked_at(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    extension._check_whole()
