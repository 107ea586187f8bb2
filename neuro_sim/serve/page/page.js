// The live page. Text from the model and from people goes into the document as text nodes, never as markup or code.
"use strict";

const el = (id) => document.getElementById(id);
const NAMES = {
  qkv: "Q, K, V projections", coincidence: "Q·K coincidences (AND and count)", av: "map × values", output: "output projection",
  residual: "residual gains", ffn_in: "feed-forward in", ffn_out: "feed-forward out",
};
const AC = 0.9, MAC = 4.6; // pJ, 45 nm, Appendix E
let layout = null, tokens = [], chosen = -1, running = null, startedAt = 0, made = 0;

function bytes(text) { return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)); }
function node(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}
function energy(pj) {
  for (const [size, unit] of [[1e9, "mJ"], [1e6, "µJ"], [1e3, "nJ"]]) if (pj >= size) return `${(pj / size).toPrecision(3)} ${unit}`;
  return `${pj.toPrecision(3)} pJ`;
}
function count(number) {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) if (number >= size) return (number / size).toPrecision(3) + unit;
  return String(number);
}
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function headers() {
  const key = el("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function canvas(target, height) {
  const width = target.clientWidth, ratio = window.devicePixelRatio || 1;
  target.width = Math.max(1, Math.round(width * ratio));
  target.height = Math.round(height * ratio);
  target.style.height = `${height}px`;
  const pen = target.getContext("2d");
  pen.scale(ratio, ratio);
  return [pen, width];
}

async function load() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.status === 401) { askKey(); return false; }
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  const model = (await answer.json()).data[0];
  layout = model.spikeopd;
  layout.id = model.id;
  el("model").textContent = `· ${model.id} · ${layout.layers} layers, ${layout.steps} steps a token, ${layout.precision}`;
  el("max_tokens").max = layout.max_new_tokens;
  el("site").replaceChildren(...layout.sites.map((site) => {
    const option = node("option", site.name);
    option.value = site.name;
    return option;
  }));
  el("site").value = layout.sites[layout.sites.length - 1].name;
  strips(el("rasters"), "Spikes");
  strips(el("attention"), "Attention");
  return true;
}
function askKey() {
  el("keylabel").hidden = false;
  problem("This server asks for a key.");
  el("key").focus();
}
function problem(text) { el("problem").textContent = text; el("problem").hidden = !text; }

function strips(into, what) {
  into.replaceChildren(...Array.from({ length: layout.layers }, (_, layer) => {
    const row = node("div", undefined, "strip"), picture = document.createElement("canvas");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", `${what} of layer ${layer}`);
    row.append(node("span", `layer ${layer}`), picture);
    return row;
  }));
}

function add(seen) {
  // A token that is fed is the one chosen before it; the chosen one is shown at once and gets its spikes when it is fed.
  let place = seen.position;
  if (!tokens[place]) show(place, seen.fed_text, seen.fed, true);
  tokens[place].seen = seen;
  tokens[place].bits = bytes(seen.raster);
  if (seen.token !== null) {
    made += 1;
    show(place + 1, seen.text, seen.token, false);
  }
}
function show(place, text, token, given) {
  const button = node("span", text || (given ? "▸" : "·"), given ? "token given" : "token");
  button.setAttribute("role", "option");
  button.setAttribute("aria-selected", "false");
  button.setAttribute("aria-label", `${given ? "prompt token" : "token"} ${place}: ${text || "no text of its own"}`);
  button.title = `token ${token} at position ${place}`;
  button.tabIndex = -1;
  button.addEventListener("click", () => choose(place));
  tokens[place] = { text: text || (place ? "·" : "▸"), button, token };
  el("text").append(button);
}
function choose(place) {
  if (!tokens[place]) return;
  if (tokens[chosen]) { tokens[chosen].button.setAttribute("aria-selected", "false"); tokens[chosen].button.tabIndex = -1; }
  chosen = place;
  tokens[place].button.setAttribute("aria-selected", "true");
  tokens[place].button.tabIndex = 0;
  draw();
}

function draw() {
  if (!layout) return;
  const done = tokens.filter((token) => token.seen);
  drawRasters(done);
  drawEnergy(done);
  drawAttention();
  drawBill();
  if (!done.length) return;
  const mean = (pick) => done.reduce((sum, token) => sum + pick(token.seen), 0) / done.length;
  const pj = mean((seen) => seen.pj), dense = mean((seen) => seen.dense_pj);
  tile("t-rate", `${(100 * mean((seen) => seen.rate)).toFixed(1)} %`, "a neuron in a step, mean");
  tile("t-energy", energy(pj), `${count(Math.round(mean((seen) => Object.values(seen.sops).reduce((a, b) => a + b, 0))))} synaptic operations`);
  tile("t-dense", energy(dense), `${(dense / pj).toFixed(2)} × this one`);
}
function tile(id, value, note) { el(id).replaceChildren(document.createTextNode(value), node("small", note)); }

function drawRasters(done) {
  const site = el("site").value, sites = layout.sites.map((one) => one.name), steps = layout.steps;
  const sizes = sites.map((name) => layout.shown[name] * steps), whole = sizes.reduce((a, b) => a + b, 0);
  const before = sizes.slice(0, sites.indexOf(site)).reduce((a, b) => a + b, 0), shown = layout.shown[site];
  const neurons = layout.sites.find((one) => one.name === site).neurons;
  el("raster-note").textContent = `${shown} of ${neurons} neurons at site ${site}, every step of every token; ` +
    "the band is the chosen token.";
  const height = shown * 2;
  el("rasters").childNodes.forEach((row, layer) => {
    const picture = row.lastChild, [pen, width] = canvas(picture, height);
    const step = Math.max(1, Math.min(4, Math.floor(width / Math.max(1, done.length * steps))));
    const room = Math.max(1, Math.floor(width / (step * steps))), first = Math.max(0, done.length - room);
    let fired = 0;
    for (let index = first; index < done.length; index += 1) {
      const left = (index - first) * steps * step, bits = done[index].bits, start = layer * whole + before;
      if (tokens[chosen] === done[index]) { pen.fillStyle = colour("--band"); pen.fillRect(left, 0, steps * step, height); }
      pen.fillStyle = colour("--spike");
      for (let time = 0; time < steps; time += 1) for (let neuron = 0; neuron < shown; neuron += 1) {
        const bit = start + time * shown + neuron;
        if (bits[bit >> 3] & (128 >> (bit & 7))) { pen.fillRect(left + time * step, neuron * 2, Math.max(1, step - .4), 1.6); fired += 1; }
      }
    }
    const rate = done.length ? done.reduce((sum, token) => sum + token.seen.rates[layer], 0) / done.length : 0;
    row.firstChild.textContent = done.length ? `layer ${layer}: ${(100 * rate).toFixed(1)} %` : `layer ${layer}`;
    picture.setAttribute("aria-label", `Spikes of layer ${layer}, site ${site}: ${fired} shown, rate ${(100 * rate).toFixed(1)} percent`);
  });
}

function drawEnergy(done) {
  const [pen, width] = canvas(el("energy"), 96), most = Math.max(1, ...done.flatMap((token) => [token.seen.pj, token.seen.dense_pj]));
  const step = Math.min(24, width / Math.max(1, done.length)), scale = 88 / most;
  done.forEach((token, index) => {
    pen.fillStyle = colour(tokens[chosen] === token ? "--hot" : "--spike");
    const high = token.seen.pj * scale;
    pen.fillRect(index * step, 96 - high, Math.max(1, step - 1), high);
  });
  pen.strokeStyle = colour("--ink");
  pen.lineWidth = 1.5;
  pen.beginPath();
  done.forEach((token, index) => pen.lineTo((index + .5) * step, 96 - token.seen.dense_pj * scale));
  pen.stroke();
}

function drawAttention() {
  const token = tokens[chosen], seen = token && token.seen;
  el("attention-note").textContent = !token ? "Choose a token above." : !seen ? "This token was not fed: nothing followed it." :
    "How often the spikes of this token's queries met those of each earlier token's keys often enough to fire, over all heads and steps.";
  const totals = [];
  el("attention").childNodes.forEach((row, layer) => {
    const [pen, width] = canvas(row.lastChild, 18);
    row.firstChild.textContent = `layer ${layer}`;
    if (!seen) return;
    const counts = bytes(seen.attention[layer]), first = seen.position + 1 - counts.length, most = Math.max(1, ...counts);
    const step = Math.min(18, width / counts.length);
    let fired = 0;
    counts.forEach((number, index) => {
      pen.globalAlpha = number / most;
      pen.fillStyle = colour("--hot");
      pen.fillRect(index * step, 0, Math.max(1, step - .5), 18);
      fired += number;
      totals[first + index] = (totals[first + index] || 0) + number;
    });
    pen.globalAlpha = 1;
    row.firstChild.textContent = `layer ${layer}: ${fired}`;
  });
  const best = Object.keys(totals).sort((a, b) => totals[b] - totals[a]).slice(0, 5).filter((place) => totals[place]);
  if (seen) el("attention-note").append(best.length ? ` Most: ${best.map((place) => `${JSON.stringify(tokens[place].text)} (${totals[place]})`).join(", ")}.` : " None fired.");
}

function drawBill() {
  const body = el("bill").tBodies[0], token = tokens[chosen], seen = token && token.seen;
  if (!seen) { body.replaceChildren(); return; }
  const rows = Object.entries(seen.sops).map(([name, number]) => [NAMES[name] || name, `${count(number)} SOPs`, AC * number]);
  rows.push(["embedding and head, dense", `${count(seen.macs)} MACs`, MAC * seen.macs]);
  rows.push(["all", "", seen.pj], ["dense network of these sizes", `${count(Math.round(seen.dense_pj / MAC))} MACs`, seen.dense_pj]);
  body.replaceChildren(...rows.map(([name, number, pj]) => {
    const row = node("tr");
    for (const text of [name, number, energy(pj), `${(100 * pj / seen.pj).toFixed(0)} %`]) row.append(node("td", text));
    return row;
  }));
}

async function generate() {
  problem("");
  if (!layout && !(await load())) return;
  tokens = []; chosen = -1; made = 0;
  el("text").replaceChildren();
  running = new AbortController();
  el("stop").hidden = false;
  el("go").disabled = true;
  el("status").textContent = "Reading the prompt …";
  startedAt = performance.now();
  const number = (id) => (el(id).value === "" ? undefined : Number(el(id).value));
  const body = { model: layout.id, prompt: el("prompt").value, stream: true, spikeopd: { spikes: true }, max_tokens: number("max_tokens"),
    temperature: number("temperature"), top_p: number("top_p"), seed: number("seed"), stream_options: { include_usage: true } };
  try {
    const answer = await fetch("v1/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!answer.ok) {
      if (answer.status === 401) askKey();
      else problem((await answer.json()).error.message);
      return;
    }
    await read(answer.body.getReader());
  } catch (error) {
    if (error.name !== "AbortError") problem(`The connection broke: ${error.message}`);
    el("status").textContent = "Stopped.";
  } finally {
    running = null;
    el("stop").hidden = true;
    el("go").disabled = false;
    if (chosen < 0 && tokens.length) choose(Math.max(0, tokens.filter((token) => token.seen).length - 1));
    draw();
  }
}
async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) take(JSON.parse(line.slice(6)));
    requestAnimationFrame(draw);
  }
}
function take(chunk) {
  if (chunk.error) { problem(chunk.error.message); return; }
  for (const seen of (chunk.spikeopd && chunk.spikeopd.tokens) || []) add(seen);
  const seconds = (performance.now() - startedAt) / 1000;
  if (made > 1) tile("t-speed", `${(made / seconds).toFixed(0)} tokens/s`, "with everything on this page");
  el("status").textContent = `${made} new tokens`;
  if (chunk.usage) {
    const why = { length: "the limit on new tokens", eos: "the end of the text", context: "a full context", time: "the limit on time" };
    const reason = chunk.spikeopd.stopped[0];
    el("status").textContent = `${made} new tokens, ${energy(chunk.usage.pj)} in all; ended by ${why[reason] || reason}.`;
  }
}

function theme(next) {
  const dark = next ? next === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  draw();
}

el("form").addEventListener("submit", (event) => { event.preventDefault(); if (!running) generate(); });
el("stop").addEventListener("click", () => running && running.abort());
el("site").addEventListener("change", draw);
el("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
window.addEventListener("resize", draw);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) { event.preventDefault(); generate(); }
  const typing = ["TEXTAREA", "INPUT", "SELECT"].includes(document.activeElement.tagName);
  if (!typing && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    event.preventDefault();
    choose(Math.min(tokens.length - 1, Math.max(0, (chosen < 0 ? tokens.length : chosen) + (event.key === "ArrowLeft" ? -1 : 1))));
    if (tokens[chosen]) tokens[chosen].button.focus();
  }
});
theme();
load().catch((error) => problem(`The model cannot be asked: ${error.message}`));
