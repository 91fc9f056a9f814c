"""Options that several commands share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def apply(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several option decorators as one, in the order given."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (with a schema number).")

inputs_options = apply(
    click.option("--inputs", metavar="FILE.npz",
                 help="Input values: arrays named by input, or set0/in/<input>, set1/in/<input>, …"),
    click.option("--input-shapes", multiple=True, metavar="NAME:1,3,…",
                 help="Shape of an input for generated values; may be given several times."),
    click.option("--save-inputs", metavar="FILE.npz", help="Write the input values that were used."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of generated values."),
)

custom_ops_option = click.option(
    "--custom-ops", multiple=True, metavar="LIB", help="Another custom-op library that the model needs."
)


def _set_verbosity(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value:
        logging.basicConfig(level=logging.DEBUG if value > 1 else logging.INFO, format="%(name)s: %(message)s")
    return value


verbosity_options = apply(
    click.option("-q", "--quiet", is_flag=True, help="Print no summary and no progress."),
    click.option("-v", "--verbose", count=True, callback=_set_verbosity, help="Print more; -vv for debugging."),
)
