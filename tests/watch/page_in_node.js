// Runs the page's script without a browser: a document of a few classes, enough to see what the script makes.
// node page_in_node.js PAGE.html WORKER...: clicks on these, and prints what ended up in the page, as JSON.
"use strict";
const fs = require("fs");
const html = fs.readFileSync(process.argv[2], "utf8");
const script = html.match(/<script>([\s\S]*?)<\/script>/)[1];
const data = html.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/);
class Node {
  constructor(name) { this.name = name; this.attributes = {}; this.children = []; this.style = {}; this.dataset = {}; this.own = ""; this.clientWidth = 800; this.hidden = false; this.listeners = {}; }
  setAttribute(key, value) { this.attributes[key] = String(value); if (key === "id") elements[value] = this; if (key === "data-act") this.dataset.act = value; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; this.own = ""; }
  get lastChild() { return this.children[this.children.length - 1]; }
  set textContent(value) { this.children = []; this.own = value; }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(""); }
  addEventListener(kind, call) { this.listeners[kind] = call; }
  getContext() { return {createImageData: (w, h) => ({data: new Uint8Array(4 * w * h)}), putImageData: () => {}}; }
  showModal() { this.open = true; } close() { this.open = false; }
  all() { return [this, ...this.children.flatMap(child => child.all())]; }
}
const elements = {};
for (const [, id] of html.matchAll(/ id="([\w-]+)"/g)) elements[id] = new Node(id);
if (data) elements.data.textContent = data[1]; else delete elements.data;
global.Node = Node;
global.document = {
  getElementById: id => elements[id] || null, createElement: name => new Node(name), createElementNS: (space, name) => new Node(name),
  createTextNode: text => { const made = new Node("#text"); made.own = String(text); return made; },
  querySelectorAll: () => [], documentElement: new Node("html"), body: new Node("body"), activeElement: null, hidden: false,
};
global.addEventListener = () => {};
global.innerWidth = 800;
const tested = script.replace("if (inside) show(inside);", "global.hmac = hmac; if (inside) show(inside);");
(0, eval)(tested);
const out = {names: [], texts: {}, marks: [], hmac: ""};
for (const [id, element] of Object.entries(elements)) out.texts[id] = element.textContent;
out.names = [...new Set(Object.values(elements).flatMap(one => one.all()).map(one => one.name))];
out.marks = elements.workers.all().filter(one => one.attributes["data-mark"]).map(one => one.attributes["data-mark"]);
out.rows = elements.workers.all().filter(one => one.attributes["data-worker"]).map(one => [one.attributes["data-worker"], one.attributes["data-end"]]);
const text = new TextEncoder();
out.hmac = ["", "a", "x".repeat(200)].map(message => hmac(text.encode("k".repeat(message.length)), text.encode(message)));
out.details = {};
for (const worker of process.argv.slice(3)) { const row = elements.workers.all().find(one => one.attributes["data-worker"] === worker); row.listeners.click(); out.details[worker] = elements.detail.textContent; }
out.bad = elements["n-copies"].className;
console.log(JSON.stringify(out));
