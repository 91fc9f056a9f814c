"""The page's style sheet: one column on a phone, light and dark by the reader's own setting, nothing loaded."""

CSS = """
:root {
  --ground: #fbfaf8; --panel: #ffffff; --text: #1d1c1a; --quiet: #6a6761; --line: #e3dfd8;
  --accent: #1f6f5c; --accent-soft: #d9ece6; --old: #b9b3a8; --warn: #9a5b00; --warn-soft: #fbeed6;
  --bad: #a8281e; --bad-soft: #fae1de; --code: #f3f0ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #161513; --panel: #1f1e1b; --text: #ece9e3; --quiet: #a29d93; --line: #35322d;
    --accent: #6cc5ab; --accent-soft: #1d3a33; --old: #57524a; --warn: #e8b562; --warn-soft: #3a2d14;
    --bad: #f08a80; --bad-soft: #43211d; --code: #2a2824;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 1.25rem 1rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
p { margin: .5rem 0; }
.quiet { color: var(--quiet); font-size: .9rem; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88em; }
code { background: var(--code); border-radius: 4px; padding: .1em .35em; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: .75rem .9rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.2; font-weight: 650; }
.tile span { color: var(--quiet); font-size: .85rem; }
.tile.good b { color: var(--accent); } .tile.bad b { color: var(--bad); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; background: var(--panel); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .45rem .75rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td { border-bottom: 0; }
th { color: var(--quiet); font-weight: 500; font-size: .82rem; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td .mono { overflow-wrap: break-word; }
.bar { display: block; height: .55rem; border-radius: 3px; background: var(--old); min-width: 1px; }
.bar.new { background: var(--accent); margin-top: 2px; }
.bars { min-width: 7rem; vertical-align: middle; }
.tag { display: inline-block; border-radius: 999px; padding: .05rem .55rem; font-size: .78rem; white-space: nowrap;
  background: var(--code); color: var(--quiet); }
.tag.good { background: var(--accent-soft); color: var(--accent); }
.tag.warn { background: var(--warn-soft); color: var(--warn); }
.tag.bad { background: var(--bad-soft); color: var(--bad); }
.layer { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; margin: .75rem 0; }
.layer > header { display: flex; gap: .6rem; align-items: baseline; flex-wrap: wrap; padding: .6rem .9rem;
  border-bottom: 1px solid var(--line); }
.layer > header b { font-weight: 600; }
.layer ol { list-style: none; margin: 0; padding: .25rem 0; }
.step { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0 .75rem; padding: .3rem .9rem;
  border-left: 3px solid transparent; }
.step.fused { border-left-color: var(--accent); }
.step.missed { border-left-color: var(--warn); }
.step .what { overflow-wrap: anywhere; }
.step .shape { color: var(--quiet); font-size: .82rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.step .why { grid-column: 1 / -1; font-size: .85rem; color: var(--warn); overflow-wrap: anywhere; }
.miss { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem;
  margin: .6rem 0; }
.miss dl { display: grid; grid-template-columns: 5.5rem minmax(0, 1fr); gap: .15rem .5rem; margin: .4rem 0 0;
  font-size: .9rem; }
.miss dt { color: var(--quiet); } .miss dd { margin: 0; overflow-wrap: anywhere; }
details > summary { cursor: pointer; padding: .4rem 0; color: var(--accent); }
footer { margin-top: 3rem; color: var(--quiet); font-size: .85rem; }
@media (max-width: 34rem) {
  main { padding: 1rem .75rem 3rem; }
  th, td { padding: .4rem .5rem; }
  .step { padding: .2rem .7rem; }
  .step .shape { font-size: .75rem; }
  h2 { margin-top: 2rem; }
}
@media print { body { background: #fff; } .tile, .scroll, .layer, .miss { break-inside: avoid; } }
"""
