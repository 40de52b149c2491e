// Elements out of plain calls, and the page changed in place, so that focus, selection and open details stay where they are.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "rect", "path", "circle", "line", "g"]);

/** h("td", { class: "number", "data-key": id }, "text", element, [more], null) */
export function h(tag, attributes = {}, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** Make `old` what `fresh` is, with as little change as possible. Children are matched by `data-key`, then by place. */
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // What a reader has opened stays open.
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  children(old, fresh);
}

const key = (node) => node.dataset?.key;

function children(old, fresh) {
  const keyed = new Map([...old.childNodes].filter(key).map((node) => [key(node), node]));
  let here = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const name = key(wanted);
    let match = name ? keyed.get(name) : here && !key(here) && here.nodeName === wanted.nodeName ? here : null;
    if (!match) {
      old.insertBefore(wanted, here);
      continue;
    }
    keyed.delete(name);
    if (match === here) here = here.nextSibling;
    else old.insertBefore(match, here);
    morph(match, wanted);
  }
  while (here) {
    const next = here.nextSibling;
    if (!key(here) || keyed.has(key(here))) here.remove();
    here = next;
  }
}
