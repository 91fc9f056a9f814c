"""Small pieces of HTML. Everything that is text is escaped here and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escaped text; markup stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def tag(name: str, *content: object, **attributes: str) -> Html:
    """`<name …>content</name>`; `cls` is the class."""
    shown = "".join(f' {"class" if k == "cls" else k}="{html.escape(v)}"' for k, v in attributes.items() if v)
    return Html(f"<{name}{shown}>{''.join(text(c) for c in content)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    return Html("".join(text(p) for p in parts))


def mono(value: object) -> Html:
    return tag("span", value, cls="mono")


def table(header: Sequence[str], rows: Iterable[Sequence[object]], numeric: Sequence[int] = ()) -> Html:
    """A table that scrolls sideways in a narrow window. `numeric` columns are aligned right."""
    classes = ["n" if i in numeric else "" for i in range(len(header))]
    head = tag("tr", *(tag("th", h, cls=c) for h, c in zip(header, classes, strict=True)))
    body = [tag("tr", *(tag("td", cell, cls=c) for cell, c in zip(row, classes, strict=True))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), cls="scroll")


def bars(before: float, after: float, largest: float) -> Html:
    """Two bars, one above the other: grey before, green after."""
    old, new = (max(0.0, min(100.0, 100 * v / largest if largest else 0)) for v in (before, after))
    return join([
        Html(f'<span class="bar" style="width:{old:.1f}%"></span>'),
        Html(f'<span class="bar new" style="width:{new:.1f}%"></span>'),
    ])  # fmt: skip


def amount(number: float | None, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: `1.23 G`."""
    if number is None:
        return "?"
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def milliseconds(value: float) -> str:
    return f"{value:.3f} ms" if value < 10 else f"{value:.1f} ms"
