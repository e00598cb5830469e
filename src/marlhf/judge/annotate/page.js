// The page: requests the next pair, shows it as text and sends the vote.
// Nothing here ever becomes HTML: text is set as text. Each action has an id, so that one that is sent
// again because the server did not answer counts once.
"use strict";

const PAUSE = 200; // ms in which a new pair accepts no vote: a double tap must not vote twice
const AGAIN = 1000; // ms between attempts while the server does not answer
const TIMEOUT = 20000; // ms until a request is given up and repeated
const CONFIRMATION = { // on a wide page, and on a narrow one, where one side is below the other
  left: ["Left was better", "First"],
  tie: ["A tie", "Tie"],
  right: ["Right was better", "Second"],
  skip: ["Skipped: it is shown again at the end", "Skipped"],
};
const strong = (value) => () => {
  const box = document.querySelector(`#strength input[value="${value}"]`);
  if (!at("strength").hidden) box.checked = !box.checked;
};
const REMARK_KEYS = {
  m: () => toggleRaw(), f: () => at("flag").click(), n: () => at("note").focus(),
  q: strong(1), w: strong(2), e: strong(3),
};
const KEYS = { 1: "left", 2: "tie", 3: "right", s: "skip" };

const at = (id) => document.getElementById(id);
const narrow = window.matchMedia("(max-width: 760px)");
let who = "";
let pair = null;
let guide = null;
let canUndo = false;
let format = null; // markdown.js, once it is loaded
let isRaw = false; // whether Markdown is shown as it was written
let seen = new Set(); // answers whose end was on the screen

// What the browser stores, if it may: the name, and an action without an answer yet.
const memory = {
  get: (kind, key) => { try { return kind.getItem(key); } catch { return null; } },
  set: (kind, key, value) => { try { kind.setItem(key, value); } catch { /* storage is disabled */ } },
  drop: (kind, key) => { try { kind.removeItem(key); } catch { /* nothing was there */ } },
};

function setState(state) {
  document.body.dataset.state = state;
  for (const button of document.querySelectorAll("[data-vote], #undo, #undo-last")) {
    button.setAttribute("aria-disabled", String(state !== "ready" && state !== "end"));
  }
}

function notice(message) {
  at("notice").textContent = message;
  at("notice").hidden = !message;
}

function show(id) {
  for (const each of ["welcome", "work", "end"]) at(each).hidden = each !== id;
}

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

// The server's answer, repeating the request until there is one; its own message if it refuses.
async function ask(path, body) {
  for (;;) {
    try {
      const options = body === undefined ? {} : {
        method: "POST", body, headers: { "Content-Type": "application/json" },
      };
      const signal = AbortSignal.timeout(TIMEOUT);
      const reply = await fetch(path, { cache: "no-store", signal, ...options });
      if (reply.status < 500) {
        const data = await reply.json();
        notice("");
        return { ok: reply.ok, status: reply.status, data };
      }
    } catch { /* no answer, or an incomplete one */ }
    notice(body === undefined
      ? "The server does not answer. This page continues as soon as it does."
      : "The server does not answer. Your vote is kept here and sent as soon as it does.");
    await wait(AGAIN);
  }
}

function actionName() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

// Send a vote or an undo and show what comes next.
async function send(path, fields, confirmation) {
  setState("sending");
  const body = JSON.stringify({ annotator: who, action: actionName(), ...fields });
  memory.set(sessionStorage, "unsent", JSON.stringify({ path, body }));
  await deliver(path, body, confirmation);
}

async function deliver(path, body, confirmation) {
  const reply = await ask(path, body);
  memory.drop(sessionStorage, "unsent");
  if (reply.ok) {
    render(reply.data);
    at("confirmation").textContent = confirmation;
  } else {
    await load();
    notice(reply.data.error);
  }
}

// Load this annotator's progress from the server.
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
  at("confirmation").textContent = "";
  at("prompt").replaceChildren(...pair.prompt.map(turnPart));
  at("reference-part").hidden = !pair.reference;
  at("reference").textContent = pair.reference;
  renderAnswers();
  clearRemarks();
  fold();
  window.scrollTo(0, 0);
  seen = new Set();
  look();
  at("undo").hidden = !canUndo;
  document.body.dataset.pair = pair.id;
  setState("shown");
  const shown = pair.id;
  return setTimeout(() => {
    if (pair && pair.id === shown && document.body.dataset.state === "shown") setState("ready");
  }, PAUSE);
}

// Both answers in the same way: as Markdown where one of them has any, unless the raw text is wanted.
// Conversations are shown turn by turn, as prompts are.
function renderAnswers() {
  const sides = ["left", "right"].filter((side) => !pair.turns[side].length);
  const marked = sides.some((side) => format.isMarkdown(pair[side]));
  at("raw").hidden = !marked;
  at("raw-label").textContent = isRaw ? "Show formatted" : "Show as written";
  for (const side of ["left", "right"]) {
    const text = pair[side];
    const turns = pair.turns[side];
    const formatted = marked && !isRaw && Boolean(text.trim()) && !turns.length;
    if (turns.length) at(side).replaceChildren(...turns.map(turnPart));
    else if (formatted) at(side).replaceChildren(...format.markdown(text));
    else at(side).textContent = text.trim() ? text : "(empty)";
    at(side).classList.toggle("formatted", formatted);
    at(side).classList.toggle("empty", !text.trim());
    at(side).scrollTop = 0;
  }
}

function toggleRaw() {
  if (!pair || at("raw").hidden) return;
  isRaw = !isRaw;
  renderAnswers();
  look();
}

function clearRemarks() {
  for (const box of document.querySelectorAll(".remarks input")) box.checked = false;
  at("note").value = "";
}

function remarks() {
  const chosen = document.querySelector("#strength input:checked");
  return {
    strength: chosen ? Number(chosen.value) : null, flag: at("flag").checked, note: at("note").value.trim(),
  };
}

function turnPart(turn) {
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
}

// Long prompts and references are folded at first; a conversation shows its end.
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

// Mark texts that continue below what is shown, and note which answers have been read to their end.
function look() {
  for (const box of document.querySelectorAll("#work .text")) {
    const rest = box.scrollHeight - box.clientHeight - box.scrollTop;
    box.classList.toggle("continues", rest > 2);
  }
  if (!pair) return;
  const bottom = window.innerHeight - document.querySelector("footer").offsetHeight;
  for (const side of ["left", "right"]) {
    const box = at(side);
    if (box.getBoundingClientRect().bottom <= bottom + 24) seen.add(side);
  }
  document.body.dataset.seen = seen.size === 2 ? "both" : "part";
  at("hint").hidden = !narrow.matches || seen.size === 2;
}

// A page down in both answers at once, so that they can be compared line by line.
function page(direction) {
  const boxes = ["left", "right"].map(at).filter((box) => box.scrollHeight > box.clientHeight + 2);
  for (const box of boxes) box.scrollBy(0, direction * box.clientHeight * 0.9);
  return boxes.length > 0;
}

function renderEnd(state) {
  show("end");
  delete document.body.dataset.pair;
  at("end-title").textContent = `Thank you, ${who}`;
  at("counts").textContent = state.total
    ? `You have compared all ${state.total} pairs.` : "Every pair has its votes already.";
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
  if (narrow.matches && seen.size < 2 && choice !== "skip") return; // the hint says why
  const fields = { pair: pair.id, vote: choice, ...remarks() };
  send("/api/vote", fields, CONFIRMATION[choice][narrow.matches ? 1 : 0]);
}

function undo() {
  if (!canUndo || !["ready", "end"].includes(document.body.dataset.state)) return;
  send("/api/undo", {}, "Undone");
}

function leave() {
  if (["sending", "loading"].includes(document.body.dataset.state)) return;
  memory.drop(localStorage, "annotator");
  who = "";
  notice("");
  welcome();
}

window.addEventListener("scroll", look, { passive: true });
window.addEventListener("resize", look);
document.addEventListener("scroll", look, { passive: true, capture: true });
document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof HTMLInputElement && event.target.type === "text") {
    if (event.target.id === "note" && ["Enter", "Escape"].includes(event.key)) event.target.blur();
    return;
  }
  const key = event.key.toLowerCase();
  if (pair && key in REMARK_KEYS) {
    event.preventDefault();
    REMARK_KEYS[key]();
  }
  if (key in KEYS) vote(KEYS[key]);
  if (key === "u") undo();
  const direction = { pagedown: 1, pageup: -1 }[key];
  if (direction && pair && page(direction)) event.preventDefault();
});
for (const button of document.querySelectorAll("[data-vote]")) {
  button.addEventListener("click", () => vote(button.dataset.vote));
}
for (const button of document.querySelectorAll(".more")) {
  button.addEventListener("click", () => {
    const whole = at(button.getAttribute("aria-controls")).classList.toggle("whole");
    button.setAttribute("aria-expanded", String(whole));
    button.textContent = whole ? "Show less" : "Show all";
    look();
  });
}
at("raw").addEventListener("click", toggleRaw);
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
  format = await import("/markdown.js");
  const reply = await ask("/api/guide");
  if (!reply.ok) return notice(reply.data.error);
  guide = reply.data;
  at("question").textContent = guide.question;
  at("strength").hidden = !guide.strength;
  at("criteria").replaceChildren(...Object.entries(guide.criteria).map(([name, meaning]) => {
    const line = document.createElement("div");
    for (const [tag, words] of [["dt", name], ["dd", meaning]]) {
      const part = document.createElement(tag);
      part.textContent = words;
      line.append(part);
    }
    return line;
  }));
  for (const box of [at("guidelines"), document.querySelector(".guidelines")]) {
    box.textContent = guide.guidelines;
  }
  at("guidelines").hidden = at("again").hidden = !guide.guidelines;
  who = memory.get(localStorage, "annotator") || "";
  if (!who) return welcome();
  const unsent = memory.get(sessionStorage, "unsent");
  if (!unsent) return load();
  const { path, body } = JSON.parse(unsent); // from before a reload
  setState("sending");
  return deliver(path, body, "");
}

start();
