"""One class per mistake. Each message says what was seen, what was expected and what to run."""

from __future__ import annotations


class AutokernError(Exception):
    """Root of every error this package raises on purpose; never raised inside an op call unless strict mode is on."""


class InvalidInputError(AutokernError):
    """A person or a file gave something unusable: a missing file, a wrong schema, an unknown op, a bad value."""


class RecordError(AutokernError):
    """The bytes of a record are not a whole, canonical, hash-true record."""


class PlanError(AutokernError):
    """A launch plan breaks the closed vocabulary or a limit."""


class OtherLibraryError(PlanError):
    """A launch plan was made under another version of a library than this process has: it waits, and is no worse for that."""


class StoreError(AutokernError):
    """A store folder cannot be written, and the caller asked for a durable write."""


class ExtensionError(AutokernError):
    """The C++ extension is missing, or was built for another torch."""


class ToolchainError(AutokernError):
    """No usable compiler was found on this machine."""


class BuildError(AutokernError):
    """A candidate did not compile, or its library breaks a static rule. Carries the compiler's words."""


class StaticRuleError(BuildError):
    """A candidate says, or its library contains, what no candidate may: known before it ever ran."""


class BoxError(AutokernError):
    """The box that untrusted code must run in could not be set up at the level that was asked for."""


class JudgeError(AutokernError):
    """The judge itself could not reach a verdict (not the candidate's fault)."""


class DeviceError(JudgeError):
    """The device itself does not answer any more: nothing can be judged on it until a person has looked."""


class RunError(AutokernError):
    """A run's folder cannot be written, or is not whole."""


class ModelError(AutokernError):
    """A language model's server refuses to serve at all: a wrong key, an unknown model, an address that is none."""


class StrictModeError(AutokernError):
    """Strict mode: a call inside an optimised scope was not served by a verified kernel."""


class BodyError(AutokernError):
    """A function's body cannot be written down as one op; the message says what in it stands in the way."""
