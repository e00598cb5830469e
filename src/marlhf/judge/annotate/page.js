// The page: asks for the next pair, shows it as text, sends what was said, and goes on.
// Nothing here ever becomes HTML: text is set as text. Each action has a name of its own, so that
// one which is sent again, because the server did not answer, counts once.
"use strict";

const PAUSE = 200; // ms in which a new pair takes no vote: a double tap is not a second opinion
const AGAIN = 1000; // ms between tries while the server does not answer
const PATIENCE = 20000; // ms until no answer is one
const SAID = { // on a wide page and on a narrow one, where the sides lie below one another
  left: ["Left was better", "First"],
  tie: ["A tie", "Tie"],
  right: ["Right was better", "Second"],
  skip: ["Skipped: it comes again at the end", "Skipped"],
};
const KEYS = { 1: "left", 2: "tie", 3: "right", s: "skip" };

const at = (id) => document.getElementById(id);
const narrow = window.matchMedia("(max-width: 760px)");
let who = "";
let pair = null;
let guide = null;
let canUndo = false;

// What the browser remembers, if it may: the name, and an action that was not answered yet.
const memory = {
  get: (kind, key) => { try { return kind.getItem(key); } catch { return null; } },
  set: (kind, key, value) => { try { kind.setItem(key, value); } catch { /* then it does not */ } },
  drop: (kind, key) => { try { kind.removeItem(key); } catch { /* nothing was there */ } },
};

function setState(state) {
  document.body.dataset.state = state;
  for (const button of document.querySelectorAll("[data-vote], #undo, #undo-last")) {
    button.setAttribute("aria-disabled", String(state !== "ready" && state !== "end"));
  }
}

function notice(words) {
  at("notice").textContent = words;
  at("notice").hidden = !words;
}

function show(id) {
  for (const each of ["welcome", "work", "end"]) at(each).hidden = each !== id;
}

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

// An answer of the server, waiting for one as long as it takes; its own words where it refuses.
async function ask(path, body) {
  for (;;) {
    try {
      const told = body === undefined ? {} : {
        method: "POST", body, headers: { "Content-Type": "application/json" },
      };
      const patience = AbortSignal.timeout(PATIENCE);
      const reply = await fetch(path, { cache: "no-store", signal: patience, ...told });
      if (reply.status < 500) {
        const data = await reply.json();
        notice("");
        return { ok: reply.ok, status: reply.status, data };
      }
    } catch { /* no answer, or half of one */ }
    notice(body === undefined
      ? "The server does not answer. This page goes on as soon as it does."
      : "The server does not answer. Your vote is kept here and sent as soon as it does.");
    await wait(AGAIN);
  }
}

function actionName() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

// Send a vote or an undo and show what comes next.
async function send(path, fields, said) {
  setState("sending");
  const body = JSON.stringify({ annotator: who, action: actionName(), ...fields });
  memory.set(sessionStorage, "unsent", JSON.stringify({ path, body }));
  await deliver(path, body, said);
}

async function deliver(path, body, said) {
  const reply = await ask(path, body);
  memory.drop(sessionStorage, "unsent");
  if (reply.ok) {
    render(reply.data);
    at("said").textContent = said;
  } else {
    await load();
    notice(reply.data.error);
  }
}

// Where this annotator is, from the server, which knows.
async function load() {
  setState("loading");
  const reply = await ask(`/api/next?annotator=${encodeURIComponent(who)}`);
  if (reply.ok) return render(reply.data);
  welcome();
  return notice(reply.data.error);
}

function render(state) {
  who = state.annotator;
  memory.set(localStorage, "annotator", who);
  pair = state.pair;
  canUndo = state.can_undo;
  if (!pair) return renderEnd(state);
  show("work");
  at("annotator").textContent = who;
  const later = state.skipped ? `, ${state.skipped} skipped` : "";
  at("progress").textContent = `${state.done} of ${state.total} compared${later}`;
  at("bar").max = state.total;
  at("bar").value = state.done;
  at("said").textContent = "";
  renderTurns(pair.prompt);
  at("reference-part").hidden = !pair.reference;
  at("reference").textContent = pair.reference;
  for (const side of ["left", "right"]) {
    const text = pair[side];
    at(side).textContent = text.trim() ? text : "(empty)";
    at(side).classList.toggle("empty", !text.trim());
    at(side).scrollTop = 0;
  }
  fold();
  window.scrollTo(0, 0);
  at("undo").hidden = !canUndo;
  document.body.dataset.pair = pair.id;
  setState("shown");
  const shown = pair.id;
  return setTimeout(() => {
    if (pair && pair.id === shown && document.body.dataset.state === "shown") setState("ready");
  }, PAUSE);
}

function renderTurns(turns) {
  at("prompt").replaceChildren(...turns.map((turn) => {
    const part = document.createElement("div");
    part.className = "turn";
    for (const [kind, words] of [["role", turn.role], ["words", turn.content]]) {
      if (kind === "role" && !words) continue;
      const piece = document.createElement("span");
      piece.className = kind;
      piece.dir = "auto";
      piece.textContent = words;
      part.append(piece);
    }
    return part;
  }));
}

// Long prompts and references begin folded; a conversation shows its end, which is asked about.
function fold() {
  for (const button of document.querySelectorAll(".more")) {
    const box = at(button.getAttribute("aria-controls"));
    box.classList.remove("whole");
    button.hidden = box.scrollHeight <= box.clientHeight + 1;
    button.setAttribute("aria-expanded", "false");
    button.textContent = "Show all";
    box.scrollTop = box.id === "prompt" && guide.from_end ? box.scrollHeight : 0;
  }
}

function renderEnd(state) {
  show("end");
  delete document.body.dataset.pair;
  at("end-title").textContent = `Thank you, ${who}`;
  at("counts").textContent = `You have compared all ${state.total} pairs.`;
  const counts = [["on the left were better", state.left], ["were ties", state.tie],
    ["on the right were better", state.right]];
  at("tally").replaceChildren(...counts.map(([words, count]) => {
    const line = document.createElement("li");
    line.textContent = `${count} ${words}`;
    return line;
  }));
  setState("end");
  at("end-title").focus();
}

function welcome() {
  pair = null;
  show("welcome");
  setState("welcome");
  at("name").value = who;
  at("name").focus();
}

function vote(choice) {
  if (document.body.dataset.state !== "ready" || !pair) return;
  send("/api/vote", { pair: pair.id, vote: choice }, SAID[choice][narrow.matches ? 1 : 0]);
}

function undo() {
  if (!canUndo || !["ready", "end"].includes(document.body.dataset.state)) return;
  send("/api/undo", {}, "Taken back");
}

function leave() {
  if (["sending", "loading"].includes(document.body.dataset.state)) return;
  memory.drop(localStorage, "annotator");
  who = "";
  notice("");
  welcome();
}

document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof HTMLInputElement) return;
  const key = event.key.toLowerCase();
  if (key in KEYS) vote(KEYS[key]);
  if (key === "u") undo();
});
for (const button of document.querySelectorAll("[data-vote]")) {
  button.addEventListener("click", () => vote(button.dataset.vote));
}
for (const button of document.querySelectorAll(".more")) {
  button.addEventListener("click", () => {
    const whole = at(button.getAttribute("aria-controls")).classList.toggle("whole");
    button.setAttribute("aria-expanded", String(whole));
    button.textContent = whole ? "Show less" : "Show all";
  });
}
at("undo").addEventListener("click", undo);
at("undo-last").addEventListener("click", undo);
at("leave").addEventListener("click", leave);
at("someone-else").addEventListener("click", leave);
at("who").addEventListener("submit", (event) => {
  event.preventDefault();
  who = at("name").value;
  load();
});

async function start() {
  const reply = await ask("/api/guide");
  if (!reply.ok) return notice(reply.data.error);
  guide = reply.data;
  at("question").textContent = guide.question;
  at("criteria").replaceChildren(...Object.entries(guide.criteria).map(([name, meaning]) => {
    const line = document.createElement("div");
    for (const [tag, words] of [["dt", name], ["dd", meaning]]) {
      const part = document.createElement(tag);
      part.textContent = words;
      line.append(part);
    }
    return line;
  }));
  who = memory.get(localStorage, "annotator") || "";
  if (!who) return welcome();
  const unsent = memory.get(sessionStorage, "unsent");
  if (!unsent) return load();
  const { path, body } = JSON.parse(unsent); // from before a reload
  setState("sending");
  return deliver(path, body, "");
}

start();
