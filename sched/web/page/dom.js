// Small helpers around the DOM. Text is only ever set as text: a name can never become markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// Make the list's children be `items`, keeping nodes (and focus) of those that stay.
export function sync(list, items, keyOf, make, update, reorder = true) {
  const have = new Map();
  for (const node of list.children) have.set(node.dataset.key, node);
  let cursor = list.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = have.get(key);
    if (node) have.delete(key);
    else {
      node = make(item);
      node.dataset.key = key;
      list.insertBefore(node, cursor);
    }
    update(node, item);
    if (node === cursor) cursor = cursor.nextElementSibling;
    else if (reorder && node.nextElementSibling !== cursor) list.insertBefore(node, cursor);
  }
  for (const node of have.values()) node.remove();
}

// The options of a <select>, rewritten only when they change.
export function options(select, pairs) {
  const wanted = JSON.stringify(pairs);
  if (select.dataset.of === wanted) return;
  const kept = select.value;
  select.dataset.of = wanted;
  select.replaceChildren(...pairs.map(([value, label]) => el("option", { value }, label)));
  if (pairs.some(([value]) => String(value) === kept)) select.value = kept;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (n) => whole.format(n);
export const ms = (n) => (n == null ? "–" : `${short.format(n)} ms`);
export const plain = (n) => (n == null ? "–" : n < 100 ? short.format(n) : whole.format(n));

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) (n /= 1024), i++;
  return `${n < 100 ? short.format(n) : whole.format(n)} ${units[i]}`;
}
