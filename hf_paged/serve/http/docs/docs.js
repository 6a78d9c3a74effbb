"use strict";
// The API as /openapi.json describes it: each route with its fields, a request that can be sent, and its answers.

const $ = (id) => document.getElementById(id);
const base = location.pathname.replace(/docs\/?$/, "");
let key = sessionStorage.getItem("hf_paged key");
let api = null;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// ---- schemas, in words

function resolved(schema) {
  return schema && schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema || {};
}

function bounds(schema) {
  const told = (value) => value !== undefined && Math.abs(value) < 2 ** 30; // not the ends of what 32 bits hold
  const [least, most] = [schema.minimum ?? schema.exclusiveMinimum, schema.maximum ?? schema.exclusiveMaximum];
  return (told(least) ? ` from ${least}` : "") + (told(most) ? ` to ${most}` : "");
}

// The type of a value; parts with fields of their own are named, and their fields listed below.
function typeOf(schema, parts) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    if (resolved(schema).properties) {
      parts.add(name);
      return name;
    }
    return typeOf(resolved(schema), parts);
  }
  const several = schema.anyOf || schema.oneOf;
  if (several) {
    const kinds = new Set(several.filter((each) => each.type !== "null").map((each) => typeOf(each, parts)));
    return [...kinds].join(" or ");
  }
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items || {}, parts)}`;
  return (schema.type || "any") + bounds(schema);
}

function fieldsTable(schema, parts) {
  const required = new Set(schema.required || []);
  return element("div", { className: "scroll" }, element("table", {}, ...Object.entries(schema.properties || {}).map(
    ([name, each]) => element("tr", {},
      element("td", {}, element("code", { textContent: name })),
      element("td", { textContent: typeOf(each, parts) + (required.has(name) ? "; required" : "") })))));
}

// The fields of a body, and those of the parts that they name.
function bodyFields(schema) {
  const found = [];
  const parts = new Set(); // grows while it is walked
  for (const each of schema.anyOf || [schema]) {
    const body = resolved(each);
    found.push(element("h2", { textContent: `body: ${body.title || "JSON"}` }), fieldsTable(body, parts));
  }
  for (const name of parts) {
    found.push(element("h2", { textContent: name }), fieldsTable(api.components.schemas[name], parts));
  }
  return found;
}

// ---- requests

function curl(method, path, body) {
  const words = ["curl", location.origin + base.replace(/\/$/, "") + path];
  if (method === "post" && body === null) words.push("-X POST");
  if (key) words.push("-H 'authorization: Bearer KEY'");
  if (body !== null) words.push(`-H 'content-type: application/json' -d '${body.replaceAll("'", "'\\''")}'`);
  return words.join(" ");
}

async function send(method, path, body, output) {
  output.textContent = "\u2026";
  try {
    const options = { method: method.toUpperCase(), headers: headers() };
    if (body !== null) Object.assign(options, { body, headers: { ...headers(), "content-type": "application/json" } });
    const answer = await fetch(base.replace(/\/$/, "") + path, options);
    output.textContent = `${answer.status} ${answer.statusText}\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      text += value;
      if (text.length < 100000) output.append(value);
      else return void reader.cancel();
    }
    if ((answer.headers.get("content-type") || "").includes("json")) {
      output.textContent = `${answer.status} ${answer.statusText}\n${JSON.stringify(JSON.parse(text), null, 2)}`;
    }
  } catch (error) {
    output.textContent = String(error.message);
  }
}

function trial(method, path, content) {
  const example = content ? JSON.stringify(content.example ?? {}, null, 2) : null;
  const text = example === null ? null : element("textarea", { value: example, rows: Math.min(12, example.split("\n").length),
                                                              ariaLabel: `body of ${path}`, spellcheck: false });
  const line = element("pre");
  const output = element("pre", { hidden: true, ariaLive: "polite" });
  const body = () => (text === null ? null : text.value);
  const show = () => { line.textContent = curl(method, path, body() === null ? null : body().replace(/\s*\n\s*/g, " ")); };
  if (text) text.addEventListener("input", show);
  show();
  const button = element("button", { type: "button", textContent: "Send" });
  button.addEventListener("click", () => {
    output.hidden = false;
    send(method, path, body(), output);
  });
  const open = path.includes("{") || path === "/map"; // its path has a name in it, or it never ends
  return [element("h2", { textContent: "request" }), ...(text ? [text] : []), line, ...(open ? [] : [button, output])];
}

function route(path, method, operation) {
  const content = ((operation.requestBody || {}).content || {})["application/json"];
  const parts = [];
  const made = element("details", {},
    element("summary", {}, element("b", { textContent: method.toUpperCase() }), element("code", { textContent: path }),
      element("span", { textContent: operation.summary || "" })));
  made.addEventListener("toggle", () => { // what many routes have is made when it is looked at
    if (made.childElementCount > 1) return;
    const parameters = operation.parameters || [];
    if (parameters.length) {
      parts.push(element("h2", { textContent: "parameters" }), element("table", {}, ...parameters.map((each) =>
        element("tr", {}, element("td", {}, element("code", { textContent: each.name })),
          element("td", { textContent: `in the ${each.in}, ${typeOf(each.schema, new Set())}` })))));
    }
    parts.push(...trial(method, path, content));
    if (content) parts.push(...bodyFields(content.schema));
    parts.push(element("h2", { textContent: "answers" }), element("table", {}, ...Object.entries(operation.responses).map(
      ([status, each]) => element("tr", {}, element("td", {}, element("code", { textContent: status })),
        element("td", { textContent: each.description })))));
    made.append(...parts);
  });
  return made;
}

// ---- the page

async function read() {
  const answer = await fetch(`${base}openapi.json`, { headers: headers() });
  if (answer.status === 401) {
    $("key").hidden = false;
    $("trouble").textContent = key ? "The server does not know this key." : "";
    return;
  }
  if (!answer.ok) {
    $("trouble").textContent = `${answer.status}: ${await answer.text()}`;
    return;
  }
  if (key) sessionStorage.setItem("hf_paged key", key);
  $("key").hidden = true;
  $("trouble").textContent = "";
  api = await answer.json();
  $("version").textContent = api.info.version;
  const routes = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => [path, method, operation]));
  routes.sort((one, other) => (one[1] === "post" ? 0 : 1) - (other[1] === "post" ? 0 : 1)); // answers first
  $("routes").replaceChildren(...routes.map((each) => route(...each)));
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key-input").value.trim();
  $("key-input").value = "";
  read();
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", setTheme);
setTheme();
$("map").href = base;
$("schema").href = `${base}openapi.json`;
read();
