"""Makes a self-contained HTML page of pictures: inline SVG, no scripts, no network, and a table below each picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from lightning_shard.dryrun.pictures.drawing import FONT, Picture, style, to_svg

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Column titles, and rows."""

_STYLE = f"""
body{{margin:0 auto;max-width:1500px;padding:24px;background:var(--paper);color:var(--ink);
font:15px/1.5 {FONT}}}
h1{{font-size:22px}} h2{{font-size:17px;margin:32px 0 8px}}
.wide{{overflow-x:auto;border:1px solid var(--grid);border-radius:6px;padding:8px}}
.wide svg{{display:block}}
table{{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}}
th,td{{border-bottom:1px solid var(--grid);padding:3px 12px;text-align:right;white-space:nowrap}}
th{{text-align:right}} th:first-child,td:first-child{{text-align:left}}
section{{margin:24px 0}}
details{{margin:8px 0 0}} details table{{display:block;max-height:420px;overflow:auto}}
summary{{cursor:pointer;color:var(--faint)}}
pre{{overflow-x:auto;font:clamp(10px,.8vw,12px)/1.5 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}}
.foot{{color:var(--faint);font-size:13px;margin-top:40px}}
@media print{{.wide{{overflow:visible;border:0}} .wide svg{{width:100%;height:auto}}}}
"""


def page(
    title: str,
    pictures: Iterable[Picture],
    *,
    lead: str = "",
    tables: Iterable[tuple[str, Table]] = (),
    text: str = "",
    foot: str = "",
) -> str:
    """Make an HTML document.

    Args:
        title: The page's title.
        pictures: The pictures.
        lead: A paragraph below the title.
        tables: (heading, table), shown above the pictures.
        text: Preformatted text, such as a table for a terminal; shown above the pictures, too.
        foot: The last paragraph, about the page's origin.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(lead)}</p>"] if lead else []
    parts += [f'<div class="wide"><pre>{escape(text)}</pre></div>'] if text else []
    for heading, table in tables:
        parts.append(f'<section><h2>{escape(heading)}</h2><div class="wide">{_table(table)}</div></section>')
    for picture in pictures:
        parts.append(f'<section><div class="wide">{to_svg(picture, alone=False)}</div>')
        if picture.facts[1]:
            count = len(picture.facts[1])
            summary = f"{picture.title}: as a table, {count} {'row' if count == 1 else 'rows'}"
            parts.append(f"<details><summary>{escape(summary)}</summary>{_table(picture.facts)}</details>")
        parts.append("</section>")
    parts += [f'<p class="foot">{escape(foot)}</p>'] if foot else []
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style()}{_STYLE}</style></head><body>",
            *parts,
            "</body></html>\n",
        ]
    )


def _table(table: Table) -> str:
    head, rows = table
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
