// Markdown as nodes of the page. Every text is set as text and no address becomes a link, so that
// nothing a model wrote can run, load or be clicked.

const MARKED = /^```|^#{1,6} |^\s*([-*]|\d+\.) |\*\*[^*\n]+\*\*|`[^`\n]+`/m;
export const isMarkdown = (text) => MARKED.test(text);

function node(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

// Code, bold and italics within a line; strings become text nodes.
function inline(text) {
  const parts = [];
  let done = 0;
  for (const match of text.matchAll(/(`+)([^]+?)\1|\*\*([^*]+)\*\*|\*([^*\s][^*\n]*)\*/g)) {
    parts.push(text.slice(done, match.index));
    if (match[2] !== undefined) parts.push(node("code", match[2]));
    else if (match[3] !== undefined) parts.push(node("strong", match[3]));
    else parts.push(node("em", match[4]));
    done = match.index + match[0].length;
  }
  parts.push(text.slice(done));
  return parts.filter((part) => part !== "");
}

// What a line begins: [kind, rest], or ["text", line].
function lineKind(line) {
  for (const [kind, pattern] of [["heading", /^#{1,6} (.*)/], ["ul", /^\s*[-*] (.*)/],
    ["ol", /^\s*\d+\. (.*)/], ["quote", /^> ?(.*)/], ["pre", /^(\|.*)/]]) {
    const found = line.match(pattern);
    if (found) return [kind, found[1]];
  }
  return line.trim() ? ["text", line] : ["empty", ""];
}

const BLOCKS = {
  heading: (lines) => lines.map((line) => node("h3", ...inline(line))),
  ul: (lines) => [node("ul", ...lines.map((line) => node("li", ...inline(line))))],
  ol: (lines) => [node("ol", ...lines.map((line) => node("li", ...inline(line))))],
  quote: (lines) => [node("blockquote", ...inline(lines.join("\n")))],
  pre: (lines) => [node("pre", lines.join("\n"))],
  text: (lines) => [node("p", ...inline(lines.join("\n")))],
  empty: () => [],
};

export function markdown(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length;) {
    if (/^\s*```/.test(lines[i])) {
      const rest = lines.slice(i + 1);
      const end = rest.findIndex((line) => /^\s*```\s*$/.test(line));
      const code = end < 0 ? rest : rest.slice(0, end);
      blocks.push(node("pre", node("code", code.join("\n"))));
      i += code.length + 2;
      continue;
    }
    const [kind] = lineKind(lines[i]);
    const same = [];
    while (i < lines.length && !/^\s*```/.test(lines[i]) && lineKind(lines[i])[0] === kind) {
      same.push(lineKind(lines[i])[1]);
      i += 1;
    }
    blocks.push(...BLOCKS[kind](same));
  }
  return blocks;
}
