"""The group of commands: loaded when used, errors turned into messages and exit codes."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import threading
from typing import Any

import click

from onnxfuse.errors import EXIT_USAGE, OnnxfuseError

#: Command -> (module with a click command of that name with `_command` added, one line of help). A new command is
#: one line here and one module.
COMMANDS: dict[str, tuple[str, str]] = {
    "optimize": ("onnxfuse.cli.optimize", "Fuse a model, verify the result, write it."),
    "verify": ("onnxfuse.cli.verify", "Compare a fused model with the original."),
    "run": ("onnxfuse.cli.run", "Run a model, fused or not, on given or generated inputs."),
    "unfuse": ("onnxfuse.cli.unfuse", "Turn fused ops back into standard ONNX ops."),
    "explain": ("onnxfuse.cli.explain", "Show why rules did not fire: the constraint that stopped each."),
    "rules": ("onnxfuse.cli.rules", "List, show, check, test and write rules."),
    "inspect": ("onnxfuse.cli.inspect", "Show what a model is: blocks, parameters, cost per op, memory."),
    "diff": ("onnxfuse.cli.diff", "Show what changed between two models, in blocks and ops."),
    "bench": ("onnxfuse.cli.bench", "Time a model before and after fusing."),
    "tune": ("onnxfuse.cli.tune", "Measure which GPU kernel is fastest for each product of a model."),
    "report": ("onnxfuse.cli.report", "Write one HTML page about what fusing does to a model."),
    "regress": ("onnxfuse.cli.regress", "Check models against expected fusions, errors and times; for CI."),
    "doctor": ("onnxfuse.cli.doctor", "Show versions, providers, library and GPU, and what is wrong with them."),
}

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_TERMINATED = 143  # 128 + SIGTERM


class _Terminated(BaseException):
    """SIGTERM as an exception, so that unfinished files are removed."""


def _terminate(*_: object) -> None:
    raise _Terminated


class _LazyGroup(click.Group):
    """Imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command `{args[0]}`; {hint}", ctx)
        return super().resolve_command(ctx, args)


def _dashes(token: str) -> str:
    return token.replace("_", "-")



@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashes, "max_content_width": 100},
)
@click.version_option(package_name="onnxfuse", message="onnxfuse %(version)s")
def cli() -> None:
    """Fuse the transformer blocks of ONNX models into few, fast ops, and prove that the result is right.

    \b
    Examples:
      onnxfuse optimize model.onnx -o model.fused.onnx
      onnxfuse verify model.onnx model.fused.onnx
      onnxfuse doctor

    Exit codes: 0 fine; 1 findings (a mismatch, something unverified, nothing fused with --fail-on-none); 2 wrong usage,
    bad input or a broken installation.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    from onnxfuse.cli import render

    given = sys.argv[1:] if arguments is None else arguments
    code = 0
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        outcome: Any = cli.main(args=given, prog_name="onnxfuse", standalone_mode=False)
        code = outcome if isinstance(outcome, int) else 0
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.Abort:
        render.note("interrupted; nothing was written")
        code = _INTERRUPTED
    except KeyboardInterrupt:
        render.note("interrupted; nothing was written")
        code = _INTERRUPTED
    except _Terminated:
        render.note("terminated; nothing was written")
        code = _TERMINATED
    except click.ClickException as problem:
        problem.show()
        code = problem.exit_code
    except OnnxfuseError as problem:
        render.error(problem, as_json="--json" in given)
        code = problem.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as problem:
        if os.environ.get("ONNXFUSE_TRACEBACK"):
            raise
        render.note(f"internal error: {type(problem).__name__}: {problem}")
        render.note("hint: this is a defect of onnxfuse; ONNXFUSE_TRACEBACK=1 shows where it happened")
        code = EXIT_USAGE
    sys.exit(code)
