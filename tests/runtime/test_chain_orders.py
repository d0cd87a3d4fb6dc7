"""Our router, an override that passes calls on (as `torch._native` does) and one that answers all (as FlagGems does): installed
and removed in every order, each call is answered by whom the order says, and nothing is left behind."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_chain import registrations
from tiny_kernels import B, D, Served, marker_plan

from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import session

pytestmark = pytest.mark.usefixtures("quiet_router")
SERVED, OTHER = torch.randn(B, D), torch.randn(B + 1, D)
SOFTMAX = {"dim": 1, "half_to_float": False}
PARTIES = ("ours", "native", "gems")
ORDERS = list(itertools.permutations(PARTIES))
ANSWERS_ALL = 7.0
MARKER = 42.0  # what our kernel in the table writes


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._softmax.default(x, 1, False)


STOCK = {x.shape[0]: softmax(x) for x in (SERVED, OTHER)}


class Override:
    """Another library's override at the CPU key."""

    def __init__(self, answers_all: bool) -> None:
        self._beneath = None if answers_all else torch.library.get_kernel("aten::_softmax", "CPU")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl("_softmax", self._run, "CPU", with_keyset=True, allow_override=True)

    def _run(self, keys: Any, x: torch.Tensor, dim: int, half: bool) -> torch.Tensor:
        if self._beneath is None:
            return torch.full_like(x, ANSWERS_ALL)
        result: torch.Tensor = self._beneath.call_boxed(keys, x, dim, half)
        return result

    def remove(self) -> None:
        self._library._destroy()


class Chain:
    """What is installed, oldest first, and what each captured: says who must answer."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.captured: dict[str, str] = {}
        self.serving = False
        self._overrides: dict[str, Override] = {}

    def install(self, party: str) -> None:
        if party == "ours":
            extension().set_process_policy(True, 1, False)
            extension().install()
            self.serving = True
        else:
            self._overrides[party] = Override(answers_all=party == "gems")
        if party not in self.stack:
            self.captured[party] = self.stack[-1] if self.stack else "stock"
            self.stack.append(party)

    def remove(self, party: str) -> None:
        if party != "ours":
            self._overrides.pop(party).remove()
        else:
            extension().set_process_policy(False, 0, False)  # as `disable` does: a pass-through must not serve
            extension().uninstall()
            self.serving = False
        if party != "ours" or self.stack[-1] == "ours":
            self.stack.remove(party)  # ours stays as a pass-through beneath another, which may have captured it

    def close(self) -> None:
        for party in list(self._overrides):
            self._overrides.pop(party).remove()
        extension().uninstall()

    def answer(self, party: str, *, served: bool) -> str:
        """Who answers a call that reaches `party`: itself, or one beneath. "gone": the passing one holds a removed kernel."""
        if party in ("stock", "gems"):
            return party
        if party == "ours" and self.serving and served:
            return "ours"
        beneath = self.captured[party]
        if beneath == "stock" or beneath in self.stack:
            return self.answer(beneath, served=served)
        if party == "native":
            return "gone"
        if self.stack[-1] == "ours":  # it looks again at what lies beneath
            below = self.stack[:-1]
            self.captured["ours"] = below[-1] if below else "stock"
            return self.answer(self.captured["ours"], served=served)
        return "stock"  # PyTorch's own kernel, known by name

    def check(self) -> None:
        for x, served in ((SERVED, True), (OTHER, False)):
            who = self.answer(self.stack[-1] if self.stack else "stock", served=served)
            if who == "gone":
                continue  # the other library's own fault: it calls what is not there any more
            fill = {"gems": ANSWERS_ALL, "ours": MARKER}.get(who)
            expected = STOCK[x.shape[0]] if fill is None else torch.full_like(x, fill)
            assert torch.equal(softmax(x), expected), (who, self.stack, self.captured)


@pytest.fixture
def chain(served: Served) -> Iterator[Chain]:
    """With a kernel in the table whose hits can be seen, and the whole process served."""
    key = SPECS["_softmax"].key([SERVED], SOFTMAX)
    served.put(key, plan=marker_plan(key))
    session()._families = 0
    extension().uninstall()
    made = Chain()
    yield made
    made.close()
    extension().set_process_policy(False, 0, False)


@pytest.mark.parametrize("removed", ORDERS, ids=" ".join)
@pytest.mark.parametrize("installed", ORDERS, ids=" ".join)
def test_every_order_of_install_and_removal(chain: Chain, installed: tuple[str, ...], removed: tuple[str, ...]) -> None:
    before = registrations()
    for party in installed:
        chain.install(party)
        chain.check()
    for party in removed:
        chain.remove(party)
        chain.check()
    extension().uninstall()  # a pass-through that was left beneath another goes with the next occasion
    assert registrations() == before
    for x in (SERVED, OTHER):
        assert torch.equal(softmax(x), STOCK[x.shape[0]])


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_ours_comes_back_in_every_order(chain: Chain, order: tuple[str, ...]) -> None:
    """Taken back and installed again while the others stay."""
    before = registrations()
    for party in order:
        chain.install(party)
    for _ in range(3):
        chain.remove("ours")
        chain.check()
        chain.install("ours")
        chain.check()
    for party in reversed(chain.stack.copy()):
        chain.remove(party)
        chain.check()
    extension().uninstall()
    assert registrations() == before
