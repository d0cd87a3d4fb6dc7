"""What a store's owner demands of records before they are served: one small file in each layer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torch_autokern.store.files import Unread, publish_file, read_file
from torch_autokern.store.key import canonical_json
from torch_autokern.store.layout import policy_file

MAX_POLICY_BYTES = 1 << 14


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`approval`: only records that a person approved are served. Who set it so, and when (ISO 8601 UTC)."""

    approval: bool = False
    by: str = ""
    when: str = ""


def read_policy(root: Path) -> Policy:
    """A layer's policy. One that is there and cannot be read demands approval: it may have said so, and stock is right."""
    content = read_file(policy_file(root), MAX_POLICY_BYTES)
    if isinstance(content, Unread):
        return Policy(approval=content.kind != "absent")
    try:
        return msgspec.json.decode(content.data, type=Policy)
    except (msgspec.DecodeError, RecursionError):
        return Policy(approval=True)


def write_policy(root: Path, policy: Policy) -> None:
    """Set it, durably.

    Raises:
        OSError: it stays as it was.
    """
    publish_file(policy_file(root), canonical_json(policy), root, replace=True)
