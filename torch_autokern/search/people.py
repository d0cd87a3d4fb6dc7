"""The kernels that people hand to a run by steering it: they stand in the journal whole, so a replay derives them."""

from __future__ import annotations

from collections.abc import Sequence

from torch_autokern.errors import InvalidInputError
from torch_autokern.search.replies import read_kernel
from torch_autokern.search.run import Run
from torch_autokern.search.steer import new_words
from torch_autokern.search.tried import Brief, Offer


class People:
    """See `Proposer`."""

    name = "people"
    derives = True

    def __init__(self, run: Run) -> None:
        self._run = run

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """See `Proposer`."""
        offers: list[Offer] = []
        for node in new_words(self._run, brief.place, brief.round, "kernel"):
            try:
                made = read_kernel(node.text, brief.key.device_type, "brought by a person", node.author or "a person")
            except InvalidInputError:
                continue  # checked before it was taken in; another version may read it otherwise
            offers.append(Offer(f"i{len(offers)}.c0", made, made.idea))
        return offers
