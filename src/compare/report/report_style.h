// The style sheet of the pages. The colours are Okabe and Ito's (2008), which people with any colour vision can tell
// apart. They are lighter on a dark ground. Every line also has its own dashes.
#pragma once

namespace tessera {

inline constexpr const char* kReportStyle = R"(
:root{color-scheme:light dark;--bg:#fff;--fg:#1a1d21;--soft:#5a626c;--line:#dfe3e8;--panel:#f6f7f9;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a8498a;--c4:#b07800;--c5:#2b87b8;
--h0:#fdf1e0;--h1:#fbdcb4;--h2:#f8c284;--h3:#f3a057;--h4:#e57a33;--h5:#c9561b;--h6:#9f3a0c;--h7:#6a2306;
--equivalent:#00795a;--worse:#b3261e;--better:#005f99;--unsure:#8a6100}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e8eaed;--soft:#a3abb5;--line:#343a41;--panel:#1d2125;
--c0:#5ab4ec;--c1:#ff9152;--c2:#3fd0a4;--c3:#e39ac9;--c4:#f0b840;--c5:#8ed3f7;
--h0:#2b2620;--h1:#47351f;--h2:#67481f;--h3:#8b5d20;--h4:#b27625;--h5:#d99436;--h6:#f4b65c;--h7:#ffe3ae;
--equivalent:#4fd3a8;--worse:#ff8a80;--better:#7cc4f5;--unsure:#f0b840}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;max-width:1240px;padding:20px 16px 48px;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:24px;line-height:1.25;margin:0 0 2px}
h2{font-size:19px;margin:34px 0 10px}
p{margin:0 0 10px}
.soft,figcaption,.verdict p{color:var(--soft);font-size:14px}
.verdict{display:flex;gap:14px;border:1px solid var(--line);border-left:6px solid var(--tone);border-radius:8px;
background:var(--panel);padding:14px 16px;margin:16px 0}
.verdict .mark{flex:none;width:38px;height:38px;border-radius:50%;border:2px solid var(--tone);color:var(--tone);
font-size:24px;line-height:32px;text-align:center;font-weight:700}
.verdict>div{flex:1}
.verdict h2{font-size:19px;line-height:1.35;margin:0 0 4px}
.verdict h2 b{color:var(--tone)}
.verdict p{margin:0}
.equivalent{--tone:var(--equivalent)}.worse{--tone:var(--worse)}
.better{--tone:var(--better)}.unsure{--tone:var(--unsure)}
.scroll{overflow-x:auto;margin:0 0 8px}
table{border-collapse:collapse;font-size:15px;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;
min-width:3.4em;overflow-wrap:normal}
thead th{color:var(--soft);font-weight:600;font-size:14px}
tbody th{font-weight:400;color:var(--soft)}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{margin:0;white-space:pre-wrap;background:var(--panel);border:1px solid var(--line);
border-radius:8px;padding:10px 12px}
.plots{display:grid;gap:26px 32px;grid-template-columns:minmax(0,1fr)}
@media(min-width:880px){.plots{grid-template-columns:repeat(2,minmax(0,1fr))}
@supports(grid-template-rows:subgrid){figure{display:grid;grid-row:span 4;grid-template-rows:subgrid;row-gap:0}}}
figure{margin:0}
figure h3{font-size:16px;margin:0 0 2px}
figure>svg{display:block;width:100%;height:auto}
figcaption{line-height:1.4}
.legend{display:flex;flex-wrap:wrap;align-content:flex-start;gap:2px 18px;font-size:14px;margin:0 0 4px}
.legend:empty{margin:0}
.legend span{display:inline-flex;align-items:center;gap:7px}
.legend svg{width:34px;height:12px;flex:none}
svg text{font:22px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--soft)}
@media(min-width:600px){svg text{font-size:18px}}
.scroll svg text{font-size:12px;fill:currentColor}
.tx{text-anchor:middle}.te,.ty{text-anchor:end}
.axis{stroke:var(--soft);fill:none;stroke-width:1.5}.grid{stroke:var(--line);fill:none;stroke-width:1.5}
.ref{stroke:var(--fg);fill:none;stroke-width:2;stroke-dasharray:2 7;stroke-linecap:round}
.s0,.s1,.s2,.s3,.s4,.s5{fill:none;stroke-width:3.5;stroke-linejoin:round}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1);stroke-dasharray:11 6}.s2{stroke:var(--c2);stroke-dasharray:3 5}
.s3{stroke:var(--c3);stroke-dasharray:20 6}.s4{stroke:var(--c4);stroke-dasharray:13 5 3 5}
.s5{stroke:var(--c5);stroke-dasharray:13 4 3 4 3 4}
.solid{stroke-dasharray:none}
.b0,.b1,.b2,.b3,.b4,.b5{stroke:none;fill-opacity:.18}
.b0{fill:var(--c0)}.b1{fill:var(--c1)}.b2{fill:var(--c2)}.b3{fill:var(--c3)}.b4{fill:var(--c4)}.b5{fill:var(--c5)}
.area{fill-opacity:.72}
.p0{fill:var(--c0)}.p1{fill:var(--c1)}.p2{fill:var(--c2)}.p3{fill:var(--c3)}.p4{fill:var(--c4)}.p5{fill:var(--c5)}
.h0{fill:var(--h0)}.h1{fill:var(--h1)}.h2{fill:var(--h2)}.h3{fill:var(--h3)}
.h4{fill:var(--h4)}.h5{fill:var(--h5)}.h6{fill:var(--h6)}.h7{fill:var(--h7)}
.mark-x{stroke:var(--soft);fill:none;stroke-width:2;stroke-dasharray:9 6}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:10px;margin:0 0 14px}
.tile{border:1px solid var(--line);border-radius:8px;background:var(--panel);padding:9px 12px}
.tile span{display:block;color:var(--soft);font-size:13px;line-height:1.35}
.tile b{display:block;font-size:20px;line-height:1.3;font-weight:600;font-variant-numeric:tabular-nums}
.bar{height:6px;border-radius:3px;background:var(--line);overflow:hidden;margin:10px 0 0}
.bar i{display:block;height:100%;background:var(--tone)}
details{margin:28px 0 0}summary{cursor:pointer;font-weight:600}
details ul{padding-left:20px;margin:10px 0}
@media print{.plots{grid-template-columns:repeat(2,minmax(0,1fr))}figure{break-inside:avoid}}
)";

}  // namespace tessera
