// A request as a command and as a program, to be run elsewhere. A key is never copied, only its place.

import { absolute, hasKey } from "../../core/api.js";

export function asCurl(bodies) {
  const key = hasKey("retrieve") ? ` \\\n  -H "Authorization: Bearer $ESPALIER_KEY"` : "";
  return bodies.map((body) => `curl -s ${quoted(absolute("retrieve"))} -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}\n`).join("\n");
}

export function asPython(bodies) {
  const key = hasKey("retrieve") ? `, api_key=os.environ["ESPALIER_KEY"]` : "";
  const asked = bodies.map(({ queries, ...options }) => `    answer = client.retrieve(
        [${query(queries[0])}],${Object.entries(options).map(([name, value]) => `\n        ${name}=${name === "rerank" && value !== true ? value.depth : python(value)},`).join("")}
    )
    for item in answer.results[0].items:
        print(item.id, item.score, item.fields)
    print(answer.timing.ms_per_query, "ms per query")
`);
  return `${key && "import os\n\n"}from espalier_client import Client, Query\n\nwith Client(${python(absolute("").replace(/\/$/, ""))}${key}) as client:\n${asked.join("\n")}`;
}

function query({ features, ...members }) {
  const own = Object.entries(members).map(([name, value]) => `${name}=${python(value)}`);
  if (features) own.push(`features={${features.indices.map((index, place) => `${index}: ${features.values[place]}`).join(", ")}}`);
  return `Query(${own.join(", ")})`;
}

// A value of JSON as Python writes it.
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// For a shell: nothing in it is special.
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
