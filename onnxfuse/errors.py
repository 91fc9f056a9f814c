"""Every error that a user can meet: what is wrong, where, and what to do about it.

Each class has an `id` (kebab-case, documented in ``docs/reference/errors.md``) and an exit code:
1 for findings (a mismatch, something that could not be verified, a failed test), 2 for usage, bad input or a broken
installation. Codes are never reused.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2


class OnnxfuseError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what is wrong, with the literal value in backticks.
        where: file:line, node or tensor, if there is one.
        hint: what the user can do.
    """

    id = "error"
    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\nhint: {self.hint}" if self.hint else text


class UsageError(OnnxfuseError):
    """An option or argument whose value does not make sense."""

    id = "bad-usage"


class ModelError(OnnxfuseError):
    """A model file that cannot be read, is not a valid model, or cannot be run."""

    id = "bad-model"


class ExternalDataError(ModelError):
    """External tensor data that is missing, too short, or outside of the model's folder."""

    id = "external-data"


class OutputError(OnnxfuseError):
    """An output that cannot be written, or that would overwrite its own input."""

    id = "bad-output"


class RuleError(OnnxfuseError):
    """A rule file that does not load, or a rule that does not exist."""

    id = "bad-rule"


class RewriteError(OnnxfuseError):
    """A match that could not be turned into a valid graph: a defect of a rule or of the rewriter."""

    id = "rewrite-failed"


class OpError(OnnxfuseError):
    """Attributes, shapes or dtypes that an op does not accept."""

    id = "bad-op"


class KvCacheError(OnnxfuseError):
    """A model whose key/value cache cannot be kept in buffers that past and present share."""

    id = "kv-cache"


class InputDataError(OnnxfuseError):
    """Input values for a model that are missing, of the wrong shape or dtype, or cannot be generated."""

    id = "bad-inputs"


class RuntimeMissingError(OnnxfuseError):
    """The custom-op library, an execution provider or a package that the command needs is not there."""

    id = "runtime-missing"


class VerificationError(OnnxfuseError):
    """A fused model that could not be shown to be right."""

    id = "not-verified"
    exit_code = EXIT_FINDINGS
    #: The report of the run that was refused, if it came that far.
    report: dict[str, object] | None = None
