"""Why a pack, or one kernel of it, is not used: a closed set of reasons, each with the command that resolves it."""

from __future__ import annotations

import enum

import msgspec


class PackReason(str, enum.Enum):
    """Every way in which a pack can be refused. The value is what `--json` prints."""

    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NOT_A_PACK = "not_a_pack"
    FORMAT_VERSION = "format_version"
    BAD_HEADER = "bad_header"
    SIZE_MISMATCH = "size_mismatch"
    UNLISTED_FILE = "unlisted_file"
    MISSING_FILE = "missing_file"
    BAD_SIGNATURE_SLOT = "bad_signature_slot"
    UNSIGNED = "unsigned"
    UNTRUSTED_KEY = "untrusted_key"
    BAD_SIGNATURE = "bad_signature"
    NO_CRYPTOGRAPHY = "no_cryptography"
    POLICY_DAMAGED = "policy_damaged"
    KEY_REVOKED = "key_revoked"
    PACK_REVOKED = "pack_revoked"
    KERNEL_REVOKED = "kernel_revoked"
    NOT_PINNED = "not_pinned"
    OP_NOT_ALLOWED = "op_not_allowed"
    ROLLBACK = "rollback"
    NAME_TAKEN = "name_taken"
    NOT_CANONICAL = "not_canonical"
    BAD_FIELD = "bad_field"
    UNKNOWN_CRITICAL = "unknown_critical"
    READER_TOO_OLD = "reader_too_old"
    DIGEST_MISMATCH = "digest_mismatch"
    BAD_ORDER = "bad_order"
    RECORD_DAMAGED = "record_damaged"
    RECORD_MISMATCH = "record_mismatch"
    FOREIGN_BLOB = "foreign_blob"
    BINARY_MISMATCH = "binary_mismatch"
    BAD_BINARY = "bad_binary"
    BAD_PLAN = "bad_plan"
    PRIVATE_WORDS = "private_words"
    UNKNOWN_OP = "unknown_op"


class PackRefusal(msgspec.Struct, frozen=True):
    """One refusal. `message` says what was seen and what was expected; `command` is what to run, "" where nothing helps but
    another pack; `kernel` is the record id where one kernel is meant, "" for the whole pack."""

    reason: PackReason
    message: str
    command: str = ""
    kernel: str = ""

    def __str__(self) -> str:
        tail = f"; run: {self.command}" if self.command else ""
        return f"{self.reason.value}: {self.message}{tail}"
