// Waits for SIGINT beside a JavaScript session, in a thread of its own: a loop that began after an await runs in no
// frame that node would end on a signal. The thread begins with the first cell that waits for something.
"use strict";
const inspector = require("inspector");
const vm = require("vm");
const { parentPort, workerData: shared } = require("worker_threads");

const ARMED = 0;
const HEARD = 1;
const PATIENCE_MS = 50; // a session that waits handles the interrupt in this time; a session that does not is in a loop

// The script reports that it waits: from then on the signal ends the script, and not the process.
globalThis.arm = () => {
  Atomics.store(shared, ARMED, 1);
  Atomics.notify(shared, ARMED);
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0);
};
const wait = new vm.Script("arm()");

const endLoop = () => {
  const session = new inspector.Session(); // open for this request only: node would not exit beside an open session
  session.connectToMainThread();
  session.post("Runtime.terminateExecution");
  session.disconnect();
};

for (;;) {
  try {
    wait.runInThisContext({ breakOnSigint: true });
  } catch {
    const before = Atomics.load(shared, HEARD);
    parentPort.postMessage("interrupt");
    if (Atomics.wait(shared, HEARD, before, PATIENCE_MS) === "timed-out") endLoop();
  }
}
