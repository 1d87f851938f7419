"""The report page's style sheet."""

STYLE = """
:root { --page: #f9f9f7; --card: #fcfcfb; --ink: #0b0b0b; --ink-2: #52514e; --muted: #898781; --grid: #e1e0d9;
  --border: rgba(11, 11, 11, .1); --series-1: #2a78d6; --series-2: #eb6834; --series-3: #1baf7a; --series-4: #eda100;
  --series-5: #a9a79f; --series-6: #8e5bd0; --series-7: #d6568f; --series-8: #4fa3a5;
  --good: #006300; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d0d0d; --card: #1a1a19; --ink: #fff; --ink-2: #c3c2b7; --muted: #898781; --grid: #2c2c2a;
    --border: rgba(255, 255, 255, .1); --series-1: #3987e5; --series-2: #d95926; --series-3: #199e70;
    --series-4: #c98500; --series-5: #6e6c66; --series-6: #9b72d8; --series-7: #c9508a; --series-8: #3f8c8e;
    --good: #0ca30c; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
.name, .label, small, .legend, figcaption, .note { color: var(--ink-2); }
.name { margin: 0; }
h1 { margin: 0; font-size: clamp(36px, 9vw, 56px); line-height: 1.15; font-weight: 650; letter-spacing: -.02em; }
h1 em { font-style: normal; color: var(--muted); font-weight: 400; }
.label { margin: 0 0 12px; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 24px; margin: 0; color: var(--ink-2); }
.facts b { color: var(--ink); }
h2 { font-size: 19px; margin: 40px 0 12px; }
h2 small { font-weight: 400; font-size: 14px; margin-left: 6px; }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
figure, article, .time, details { background: var(--card); border: 1px solid var(--border); border-radius: 8px; }
figure { margin: 0; padding: 12px 12px 6px; }
figcaption { display: flex; justify-content: space-between; gap: 12px; font-weight: 600; color: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-weight: 400; font-size: 13px; }
i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--muted); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
path.s1 { stroke: var(--series-1); } path.s2 { stroke: var(--series-2); } path.s3 { stroke: var(--series-3); }
path.s4 { stroke: var(--series-4); } path.s5 { stroke: var(--series-5); }
path.s6 { stroke: var(--series-6); } path.s7 { stroke: var(--series-7); } path.s8 { stroke: var(--series-8); }
rect.s1, circle.s1 { fill: var(--series-1); } rect.s2, circle.s2 { fill: var(--series-2); }
rect.s3, circle.s3 { fill: var(--series-3); } rect.s4, circle.s4 { fill: var(--series-4); }
rect.s5, circle.s5 { fill: var(--series-5); } rect.s6, circle.s6 { fill: var(--series-6); }
rect.s7, circle.s7 { fill: var(--series-7); } rect.s8, circle.s8 { fill: var(--series-8); }
i.s1 { background: var(--series-1); } i.s2 { background: var(--series-2); } i.s3 { background: var(--series-3); }
i.s4 { background: var(--series-4); } i.s5 { background: var(--series-5); } i.s6 { background: var(--series-6); }
i.s7 { background: var(--series-7); } i.s8 { background: var(--series-8); }
.hover rect { fill: transparent; }
.hover line { stroke: var(--muted); stroke-width: 1; }
.hover line, .hover circle, .hover text { visibility: hidden; pointer-events: none; }
.hover:hover line, .hover:hover circle, .hover:hover text { visibility: visible; }
.hover text { fill: var(--ink); }
.time { display: flex; flex-wrap: wrap; align-items: center; gap: 12px 32px; padding: 0 20px 0 0; }
.time figure { flex: 1 1 520px; border: 0; background: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 12px 20px; }
th { color: var(--ink-2); font-weight: 400; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
article { padding: 14px 16px; margin-bottom: 12px; }
article p { margin: 6px 0; color: var(--ink-2); font-size: 14px; }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { margin: 0; padding: 8px 10px; background: var(--page); border-radius: 6px; max-height: 260px; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
code { unicode-bidi: isolate; overflow-wrap: anywhere; }
.pair { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); }
.pair b { margin-right: 6px; }
.best b { color: var(--good); } .worst b { color: var(--bad); }
details { margin-top: 40px; padding: 12px 16px; }
summary { cursor: pointer; }
details pre { margin-top: 10px; max-height: none; }
"""
