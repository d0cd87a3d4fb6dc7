"""Ed25519 key files and signatures, through `cryptography`, which is imported when a signature is made or checked.

A secret key file is JSON, readable by its owner only; its twin with the suffix ``.pub`` may be given to anybody. A key has one
role: ``kernels`` vouches for what was proved, ``index`` for what is published, so neither can do the other's work.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from types import ModuleType
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.key import canonical_json
from torch_autokern.store.pack_file import Role, Signature
from torch_autokern.store.pack_manifest import Line, Sha

PUBLIC_SCHEMA = "autokern.public-key/1"
SECRET_SCHEMA = "autokern.secret-key/1"
INSTALL_COMMAND = "pip install 'torch-autokern[sign]'"
_MAX_KEY_FILE_BYTES = 4096
# What a signature is about stands in front of what is signed, so that none can be used for another purpose.
PREFIXES = {
    "kernels": b"torch_autokern pack kernels v1\x00",
    "index": b"torch_autokern pack index v1\x00",
    "statement": b"torch_autokern statement v1\x00",
}


class PublicKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key: 32 bytes in hex, what it is for, and what its owner calls it."""

    schema: str
    role: Role
    name: Line
    public: Sha

    @property
    def key_id(self) -> str:
        """SHA-256 of the public key's 32 bytes, hex."""
        return hashlib.sha256(bytes.fromhex(self.public)).hexdigest()


class SecretKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret key: the 32-byte seed in hex. Never printed."""

    schema: str
    role: Role
    name: Line
    seed: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def __repr__(self) -> str:
        return f"SecretKey(role={self.role!r}, name={self.name!r})"

    def public(self) -> PublicKey:
        """Its public half."""
        private = _ed25519().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.seed))
        raw = private.public_key().public_bytes_raw()
        return PublicKey(PUBLIC_SCHEMA, self.role, self.name, raw.hex())

    def sign(self, purpose: str, body: bytes) -> Signature:
        """Sign `body` for one of `PREFIXES`."""
        private = _ed25519().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.seed))
        value = private.sign(PREFIXES[purpose] + body)
        return Signature(self.role, self.public().key_id, value)


KeyT = TypeVar("KeyT", PublicKey, SecretKey)


def can_verify() -> bool:
    """Whether `cryptography` is installed."""
    try:
        _ed25519()
    except InvalidInputError:
        return False
    return True


def is_signed(public: str, purpose: str, body: bytes, value: bytes) -> bool:
    """Whether `value` is the signature of `body` by the public key `public` (hex) for a purpose.

    Raises:
        InvalidInputError: `cryptography` is not installed.
    """
    key_type = _ed25519().Ed25519PublicKey
    from cryptography.exceptions import InvalidSignature

    try:
        key_type.from_public_bytes(bytes.fromhex(public)).verify(value, PREFIXES[purpose] + body)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_keys(folder: Path, name: str, roles: tuple[Role, ...]) -> tuple[PublicKey, ...]:
    """Make a key for each role: ``<name>.<role>.key``, owner only, and ``<name>.<role>.pub``. Nothing is replaced.

    Raises:
        InvalidInputError: a file is there already, or cannot be written; or `cryptography` is missing.
    """
    made = []
    for role in roles:
        seed = _ed25519().Ed25519PrivateKey.generate().private_bytes_raw().hex()
        secret = SecretKey(SECRET_SCHEMA, role, name, seed)
        public = secret.public()
        _write_new(folder / f"{name}.{role}.key", canonical_json(secret), 0o600)
        _write_new(folder / f"{name}.{role}.pub", canonical_json(public), 0o644)
        made.append(public)
    return tuple(made)


def load_secret(path: Path, role: Role | None = None) -> SecretKey:
    """Read a secret key file that nobody but its owner may read.

    Raises:
        InvalidInputError: missing, open to others, of another role, or no key.
    """
    secret = _decode(_read(path, owner_only=True), SecretKey, path, SECRET_SCHEMA)
    if role is not None and secret.role != role:
        raise InvalidInputError(f"{path} is a key for {secret.role}, expected one for {role}; name the file *.{role}.key")
    return secret


def load_public(path: Path) -> PublicKey:
    """Read a public key file.

    Raises:
        InvalidInputError: missing, or no public key.
    """
    return _decode(_read(path, owner_only=False), PublicKey, path, PUBLIC_SCHEMA)


def _read(path: Path, *, owner_only: bool) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise InvalidInputError(f"{path} is not a regular file; name a key file")
            if owner_only and facts.st_mode & 0o077:
                mode = stat.S_IMODE(facts.st_mode)
                raise InvalidInputError(f"secret key {path} has mode {mode:04o}, others may read it; run: chmod 600 {path}")
            if owner_only and hasattr(os, "geteuid") and facts.st_uid != os.geteuid():
                raise InvalidInputError(f"secret key {path} belongs to uid {facts.st_uid}, this is {os.geteuid()}")
            return file.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise InvalidInputError(f"cannot read key {path}: {error.strerror}; make one with: autokern pack keys new") from error


def _decode(raw: bytes, kind: type[KeyT], path: Path, schema: str) -> KeyT:
    try:
        key = msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not a key file ({error}); expected schema {schema}") from error
    if key.schema != schema:
        raise InvalidInputError(f"{path} has another schema than {schema}; name the other file of the pair")
    return key


def _write_new(path: Path, body: bytes, mode: int) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700, parents=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(body)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise InvalidInputError(f"cannot write key {path}: {error.strerror}; choose another --name or --folder") from error


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InvalidInputError(f"signatures need the package cryptography; run: {INSTALL_COMMAND}") from error
    return ed25519
