// Two lists of items compared.

// {overlap: items in both, places: id -> {a, b} from 1, absent where it is not in that list}.
export function compared(itemsA, itemsB) {
  const places = new Map();
  itemsA.forEach(({ id }, place) => places.set(id, { a: place + 1 }));
  itemsB.forEach(({ id }, place) => places.set(id, { ...places.get(id), b: place + 1 }));
  const overlap = [...places.values()].filter((one) => one.a && one.b).length;
  return { overlap, places };
}

// What became of an item: {kind: "same" | "moved" | "new" | "lost", by: places gained, text}. side: in whose list it stands.
export function mark(places, id, side) {
  const { a, b } = places.get(id);
  if (a === undefined) return { kind: "new", text: "new in B" };
  if (b === undefined) return { kind: "lost", text: "not in B" };
  const by = side === "b" ? a - b : 0;
  if (by === 0) return { kind: "same", text: "" };
  return { kind: "moved", by, text: `${by > 0 ? "up" : "down"} ${Math.abs(by)}` };
}
