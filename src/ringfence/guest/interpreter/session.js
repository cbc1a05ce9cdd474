// Owns a JavaScript interpreter's side of the line: executes the host's cells one at a time, as a prompt would.
// The interpreter is a guest process from its first instruction: its messages are data to the host.
//
// V8's own REPL mode evaluates the cells: const and let may be declared again, await works at the top level, and
// the value of the last expression is the cell's. An inspector session inside this process reaches it, without a port.
(require, importModule, job, watcher) => {
  "use strict";
  const fs = require("fs");
  const inspector = require("inspector");
  const net = require("net");
  const path = require("path");
  const url = require("url");
  const util = require("util");
  const vm = require("vm");
  const { Buffer } = require("buffer");
  const { createRequire } = require("module");
  const { Worker } = require("worker_threads");

  const LINE = 3;
  const HOST = 4; // descriptor of the host's messages, in a session
  const MOST = 1 << 23; // bytes of a representation
  const MOST_TEXT = 1 << 16;
  const MOST_SHOWN = 1 << 14; // objects of a cell: the host hangs up after 20 000 messages
  const MOST_ARGUMENTS = 1 << 22; // the host takes fewer and says so; more than a message holds would end the session
  const nap = new Int32Array(new SharedArrayBuffer(4));
  const session = new inspector.Session();
  const IMPORT = "$import"; // what `import` becomes in a cell: V8's REPL mode has no loader

  // ── the line ──

  let received = Buffer.alloc(0);
  let socket = null;

  const writeAll = (fd, data) => {
    for (let at = 0; at < data.length; ) {
      try {
        at += fs.writeSync(fd, data, at);
      } catch (error) {
        if (error.code !== "EAGAIN") return; // the host reads no more
        Atomics.wait(nap, 0, 0, 1);
      }
    }
  };

  const send = (message, data = Buffer.alloc(0)) => {
    const text = Buffer.from(JSON.stringify(message));
    const head = Buffer.alloc(8);
    head.writeUInt32LE(text.length, 0);
    head.writeUInt32LE(data.length, 4);
    writeAll(LINE, Buffer.concat([head, text, data]));
  };

  const next = () => {
    if (received.length < 8) return null;
    const [text, data] = [received.readUInt32LE(0), received.readUInt32LE(4)];
    if (received.length < 8 + text + data) return null;
    const message = JSON.parse(received.toString("utf8", 8, 8 + text));
    const bytes = received.subarray(8 + text, 8 + text + data);
    received = received.subarray(8 + text + data);
    return [message, bytes];
  };

  /** Return the host's answer of a kind, waiting without the event loop; null when there will be none. */
  const answer = (kind, id) => {
    const piece = Buffer.alloc(1 << 16);
    for (;;) {
      for (let found = next(); found; found = next()) if (found[0].m === kind && found[0].id === id) return found;
      const early = socket && socket.read();
      if (early) {
        received = Buffer.concat([received, early]);
        continue;
      }
      try {
        const count = fs.readSync(HOST, piece);
        if (count === 0) return null;
        received = Buffer.concat([received, piece.subarray(0, count)]);
      } catch (error) {
        if (error.code !== "EAGAIN") return null;
        Atomics.wait(nap, 0, 0, 5);
      }
    }
  };

  // ── what guest code finds ──

  const clipped = (text, most) => (text.length <= most ? text : text.slice(0, most));
  const shortened = (text) => {
    const left = text.length - MOST_TEXT;
    return left <= 0 ? text : `${clipped(text, MOST_TEXT)}… (${left.toLocaleString("en-US")} more characters)`;
  };

  const representations = (value) => {
    const found = { "text/plain": Buffer.from(shortened(util.inspect(value))) };
    try {
      const bundle = value?.[Symbol.for("Jupyter.display")]?.() ?? {};
      for (const [mime, content] of Object.entries(bundle))
        found[mime.slice(0, 100)] = Buffer.from(typeof content === "string" ? content : JSON.stringify(content));
    } catch {
      // a guest's own method threw: there is no such representation
    }
    return Object.entries(found).filter(([mime, data]) => /^[ -~]+$/u.test(mime) && data.length <= MOST).slice(0, 16);
  };

  let leftToShow = MOST_SHOWN;
  const show = (value, isValue) => {
    if (!isValue && leftToShow-- <= 0) return console.log(value);
    let room = 2 * MOST - 4096;
    const shown = representations(value).filter(([, data]) => (room -= data.length) >= 0);
    const mimes = shown.map(([mime, data]) => [mime, data.length]);
    send({ m: "display", value: isValue, mimes }, Buffer.concat(shown.map(([, data]) => data)));
  };

  const define = (name, value) =>
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });

  const resolved = (name) =>
    /^(\.{1,2}(\/|$)|\/)/.test(name) ? url.pathToFileURL(path.resolve(name)).href : name;

  let asks = false;
  let leftOfLine = "";
  const readLine = () => {
    const piece = Buffer.alloc(1);
    const bytes = [];
    while (fs.readSync(0, piece) === 1) {
      if (piece[0] === 10) return Buffer.from(bytes).toString();
      bytes.push(piece[0]);
    }
    return bytes.length ? Buffer.from(bytes).toString() : null;
  };

  const prompt = (question = "") => {
    if (!asks) {
      if (question) process.stdout.write(String(question));
      return readLine();
    }
    if (!leftOfLine.includes("\n")) {
      send({ m: "prompt" }, Buffer.from(clipped(String(question), MOST_TEXT)));
      const found = answer("input");
      if (found && !found[0].eof) leftOfLine += found[1].toString();
    }
    const [line] = leftOfLine.split("\n", 1);
    const ended = leftOfLine.length === 0;
    leftOfLine = leftOfLine.slice(line.length + 1);
    return ended ? null : line;
  };

  let calls = 0;
  let inCell = false;
  const tool = (name) => (...args) => {
    const data = Buffer.from(JSON.stringify({ args, kwargs: {} }));
    if (data.length > MOST_ARGUMENTS) throw new Error(`${name}: arguments of more than ${MOST_ARGUMENTS} bytes`);
    if (!inCell) throw new Error(`${name}: its cell is over`); // no answer would come, and the next cell would be lost
    const id = ++calls;
    send({ m: "call", id, name }, data);
    const found = answer("answer", id);
    if (!found) throw new Error(`${name}: the host is gone`);
    if (!found[0].ok) throw new Error(String(found[0].error));
    return JSON.parse(found[1].toString());
  };

  // ── imports: found by a scanner that knows strings, comments, templates and regular expressions ──

  /** Return the places where `import` is code: [index, depth of brackets]. */
  const importsIn = (code) => {
    const found = [];
    const brackets = [];
    let before = ""; // the last word or sign: decides whether a slash divides or begins a regular expression
    const token = /\/\/[^\n]*|\/\*[^]*?\*\/|[\w$\u0080-\uffff]+|"(?:\\[^]|[^"\\\n])*"|'(?:\\[^]|[^'\\\n])*'|[^\s]/uy;
    const template = /(?:\\[^]|\$(?!\{)|[^\\`$])*(`|\$\{|$)/uy;
    const regexp = /\/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\[\n])+\/[a-z]*/uy;
    const inTemplate = (at) => {
      template.lastIndex = at;
      const match = template.exec(code);
      if (match && match[1] === "${") brackets.push("`");
      return match ? template.lastIndex : code.length;
    };
    for (let at = 0; at < code.length; ) {
      token.lastIndex = at;
      const match = token.exec(code);
      if (!match) {
        at += 1;
        continue;
      }
      let [text] = match;
      at = token.lastIndex;
      if (text.startsWith("//") || text.startsWith("/*")) continue;
      if (text === "/" && (!/^[\w$)\]}"'`]/u.test(before) || /^(return|typeof|case|in|of|void|await)$/.test(before))) {
        regexp.lastIndex = match.index;
        if (regexp.exec(code)) at = regexp.lastIndex;
        text = ")";
      } else if (text === "`") {
        at = inTemplate(at);
      } else if ("([{".includes(text)) {
        brackets.push(text);
      } else if (")]}".includes(text)) {
        if (brackets.pop() === "`") {
          at = inTemplate(at);
          text = "`";
        }
      } else if (text === "import" && before !== ".") {
        found.push([match.index, brackets.length]);
      }
      before = text;
    }
    return found;
  };

  const STATIC = /import\s*(?:([^"'();]*?)\s*\bfrom\s*)?(["'])([^"'\n]+)\2(?:\s*with\s*\{[^}]*\})?/uy;

  const declared = (clause) => {
    const [, first, rest] = /^\s*([\w$]+)?\s*,?\s*([^]*)$/u.exec(clause);
    const names = first ? [`default: ${first}`] : [];
    const all = /^\*\s*as\s+([\w$]+)\s*$/u.exec(rest);
    const listed = /^\{([^]*)\}\s*$/u.exec(rest);
    if (listed && listed[1].trim()) names.push(listed[1].replace(/\s+as\s+/gu, ": "));
    return [names.length ? `{${names.join(", ")}}` : null, all && all[1]];
  };

  /** Return the cell with its imports written as calls to our function. Lines stay where they are. */
  const withImports = (code) => {
    if (!code.includes("import")) return code;
    let out = "";
    let done = 0;
    for (const [at, depth] of importsIn(code)) {
      STATIC.lastIndex = at;
      const statement = depth === 0 ? STATIC.exec(code) : null;
      if (/^import\s*\(/.test(code.slice(at, at + 200))) {
        out += code.slice(done, at) + IMPORT;
        done = at + "import".length;
      } else if (statement) {
        const load = `await ${IMPORT}(${JSON.stringify(statement[3])})`;
        const [names, all] = statement[1] === undefined ? [null, null] : declared(statement[1]);
        const parts = [all && `${all} = ${load}`, names && `${names} = ${load}`].filter(Boolean);
        out += code.slice(done, at) + (parts.length ? `const ${parts.join(", ")};` : `${load};`);
        done = STATIC.lastIndex;
      }
    }
    return out + code.slice(done);
  };

  /** Return the cell as an expression if it is an object and not a block, as a prompt takes it. */
  const asExpression = (code) => {
    if (!/^\s*\{[^]*\}\s*$/u.test(code)) return code;
    try {
      new vm.Script(`async () => (${code}\n)`);
      return `(${code}\n)`;
    } catch {
      return code;
    }
  };

  // ── cells ──

  let interrupt = null; // ends the cell that is waiting for something
  const state = { run: null };
  define("$ringfence", state);
  const guarded = new vm.Script("$ringfence.run()", { filename: "<kernel>" });

  const post = (method, parameters) => {
    let found;
    session.post(method, parameters, (error, result) => (found = result));
    return found;
  };

  /** Return the object that an inspector's description is about. */
  const objectOf = (remote) => {
    const given = remote.objectId ? { objectId: remote.objectId } : remote;
    const { objectId, unserializableValue, value } = given;
    const argument = objectId ? { objectId } : unserializableValue ? { unserializableValue } : { value };
    post("Runtime.callFunctionOn", {
      functionDeclaration: "function (value) { this.value = value; }",
      objectId: post("Runtime.evaluate", { expression: "$ringfence", objectGroup: "cell" }).result.objectId,
      arguments: [argument],
    });
    const found = state.value;
    delete state.value;
    return found;
  };

  // An interrupt ends a cell in one of three ways: node ends the frame that a cell begins in; a cell that waits is
  // ended by onInterrupt; and a loop after an await by the watcher, which takes the signal from its first cell on.

  const ARMED = 0; // the same as in watcher.js
  const HEARD = 1;
  const ARMING_MS = 1000;
  let watched = null; // memory shared with the watcher, once that runs
  const onInterrupt = () => interrupt && interrupt();
  const onWatcher = () => {
    Atomics.add(watched, HEARD, 1);
    Atomics.notify(watched, HEARD);
    onInterrupt();
  };

  /** Start the watcher, which takes the signal. Until it is armed, an interrupt ends the frame that calls this. */
  const watch = () => {
    const shared = new Int32Array(new SharedArrayBuffer(8));
    const worker = new Worker(watcher, { eval: true, workerData: shared, env: {} });
    worker.on("error", () => process.on("SIGINT", onInterrupt));
    worker.on("message", onWatcher);
    worker.unref();
    watched = shared;
    Atomics.wait(shared, ARMED, 0, ARMING_MS);
  };

  const watchFromNowOn = () => {
    if (watched || job.kind !== "session") return;
    process.removeListener("SIGINT", onInterrupt); // its handler would run instead of the watcher
    state.run = watch;
    try {
      guarded.runInThisContext({ breakOnSigint: true });
    } catch (error) {
      process.on("SIGINT", onInterrupt); // no thread is free: onInterrupt ends a cell that waits, as before
      if (error.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED") throw error;
    }
  };

  /** Keep our handler when guest code takes the signal, from the watcher too: a cell that waits can still be ended. */
  const onListener = (name, listener) => {
    if (name !== "SIGINT" || listener === onInterrupt) return;
    if (!process.listeners("SIGINT").includes(onInterrupt)) process.on("SIGINT", onInterrupt);
  };

  class Interrupted extends Error {
    constructor() {
      super("the cell was interrupted");
      this.name = "Interrupted";
      this.stack = "Interrupted: the cell was interrupted";
    }
  }

  /** Return {value} or {error, at}; throw nothing. */
  const evaluate = (code, name) =>
    new Promise((end) => {
      let waits = true;
      const ended = (how) => {
        waits = false;
        end(how);
      };
      interrupt = () => ended({ error: new Interrupted() });
      const request = { expression: `${code}\n//# sourceURL=${name}`, replMode: true, objectGroup: "cell" };
      state.run = () => {
        session.post("Runtime.evaluate", request, (error, answered) => {
          const failed = answered && answered.exceptionDetails;
          if (error) ended({ error: Object.assign(new Error(error.message), { stack: error.message }) });
          else if (failed) ended({ error: objectOf(failed.exception ?? { value: failed.text }), at: failed });
          else ended({ value: objectOf(answered.result) });
        });
        process._tickCallback?.(); // code after an await on a ready value can be interrupted too
      };
      try {
        guarded.runInThisContext({ breakOnSigint: true });
        if (waits) watchFromNowOn();
      } catch (error) {
        ended({ error: error.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED" ? new Interrupted() : error });
      }
    });

  const shownName = (text) => text.replace(/<cell-(\d+)>/gu, "<cell $1>");

  const traceOf = (error, at, name) => {
    if (!(error instanceof Error) || typeof error.stack !== "string") return `Uncaught ${util.inspect(error)}`;
    const lines = error.stack.split("\n");
    const ours = lines.findIndex((line) => /^\s+at .*(node:inspector|<kernel>|_tickCallback)/u.test(line));
    const kept = ours < 0 ? lines : lines.slice(0, ours);
    if (error instanceof SyntaxError && at && !kept.some((line) => line.includes("<cell-")))
      kept.push(`    at ${name}:${at.lineNumber + 1}:${at.columnNumber + 1}`);
    return shownName(kept.join("\n"));
  };

  const described = (error, at, name) => {
    let outcome = { name: "Error", message: "<unprintable>", traceback: "" };
    try {
      const raised = error instanceof Error;
      outcome = {
        name: raised ? String(error.name) : typeof error,
        message: raised ? String(error.message) : util.inspect(error),
        traceback: traceOf(error, at, name),
      };
    } catch {
      // a guest's own getters may throw anything
    }
    const half = MOST_TEXT / 4;
    const shown = outcome.traceback;
    if (shown.length > 2 * half) outcome.traceback = `${shown.slice(0, half)}\n[...]\n${shown.slice(-half)}`;
    return { ...outcome, name: clipped(outcome.name, 200), message: clipped(outcome.message, half) };
  };

  const execute = async (code, name) => {
    const ended = await evaluate(asExpression(withImports(code)), name);
    interrupt = null;
    let exception = null;
    if ("error" in ended) {
      exception = described(ended.error, ended.at, name);
      writeAll(2, Buffer.from(`${exception.traceback}\n`));
    } else if (ended.value !== undefined) {
      define("_", ended.value);
      show(ended.value, true);
    }
    post("Runtime.releaseObjectGroup", { objectGroup: "cell" });
    return exception;
  };

  let inputEnd = 0; // where the standard input of the last cell ended in the file that descriptor 0 is
  const giveInput = (data) => {
    const piece = Buffer.alloc(1 << 16);
    while (fs.readSync(0, piece) > 0); // skip what the cell before did not read
    fs.ftruncateSync(0, inputEnd);
    if (data && data.length) fs.writeSync(0, data, 0, data.length, inputEnd);
    inputEnd += data ? data.length : 0;
    let stream = null;
    Object.defineProperty(process, "stdin", {
      configurable: true,
      enumerable: true,
      get: () => (stream ??= fs.createReadStream(null, { fd: 0, autoClose: false })),
    });
  };

  const cell = async (message, data) => {
    const before = Object.keys(message.env).map((name) => [name, process.env[name]]);
    Object.assign(process.env, message.env);
    asks = message.asks;
    leftOfLine = "";
    giveInput(message.stdin === null ? null : data.subarray(message.code));
    inCell = true;
    leftToShow = MOST_SHOWN;
    const exception = await execute(data.toString("utf8", 0, message.code), `<cell-${message.n}>`);
    inCell = false;
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    send({ m: "done", n: message.n, exit: null, exception });
  };

  // ── the beginning ──

  const uncaught = (error) => writeAll(2, Buffer.from(`${traceOf(error, null, "")}\n`));

  const serve = () => {
    process.on("SIGINT", onInterrupt);
    process.on("newListener", onListener);
    process.on("uncaughtException", uncaught);
    socket = new net.Socket({ fd: HOST, readable: true, writable: false });
    let busy = false;
    const work = async () => {
      if (busy) return;
      busy = true;
      socket.pause();
      for (let found = next(); found; found = next()) if (found[0].m === "cell") await cell(...found);
      busy = false;
      socket.resume();
    };
    socket.on("data", (piece) => {
      received = Buffer.concat([received, piece]);
      work();
    });
    socket.on("error", () => process.exit(0));
    socket.on("end", () => process.exit(0));
  };

  const once = async () => {
    const exception = await execute(job.code, "<run>");
    if (exception === null) return;
    process.exitCode = 1;
    send({ m: "done", n: 0, exit: null, exception });
  };

  // What was printed leaves this process before the end of the cell is reported: node would queue what a pipe refuses.
  for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);
  session.connect();
  process.argv.splice(1, Infinity, ...(job.args ?? []));
  process.execArgv.length = 0;
  define("require", createRequire(path.resolve("session")));
  define(IMPORT, (name) => importModule(resolved(String(name))));
  define("display", (...values) => values.forEach((value) => show(value, false)));
  define("prompt", prompt);
  for (const name of job.tools ?? []) define(name, tool(name));
  if (job.kind === "session") serve();
  else once();
};
