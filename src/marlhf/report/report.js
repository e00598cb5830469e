// A search box for samples. The only script of the page: all else works without one.
"use strict";
const list = document.querySelector("#samples .samples");
if (list) {
  const samples = Array.from(list.children, (sample) => {
    const texts = Array.from(sample.querySelectorAll(".prompt, .said"), (each) => each.textContent);
    return [sample, plain(texts.join("\n"))];
  });
  const label = document.createElement("label");
  const box = document.createElement("input");
  const count = document.createElement("output");
  label.className = "search";
  box.type = "search";
  box.placeholder = "words of a prompt or response";
  label.append("Search", box, count);
  list.before(label);
  box.addEventListener("input", () => {
    const wanted = plain(box.value);
    let shown = 0;
    for (const [sample, words] of samples) {
      sample.hidden = !words.includes(wanted);
      if (!sample.hidden) shown += 1;
    }
    count.textContent = wanted ? `${shown} of ${samples.length}` : "";
  });
}

function plain(text) {
  return text.toLowerCase().replace(/\s+/g, " ").trim();
}
