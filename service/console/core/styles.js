// The styles of one view, fetched with it: needStyle(new URL("./lab.css", import.meta.url)).

const needed = new Set();

export function needStyle(url) {
  if (needed.has(url.href)) return;
  needed.add(url.href);
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = url.href;
  document.head.append(link);
}
