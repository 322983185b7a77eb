// Sends requests that differ in all parts with Node's gRPC client; prints seconds and latencies as JSON.
//
//     node benchmarks/differing_node.mjs ADDRESS MODEL CLIENTS REQUESTS

import { randomBytes } from "node:crypto";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const folder = new URL("../examples/node_client/", import.meta.url);
const require = createRequire(folder); // `make node-client` installs the packages there
const grpc = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");
const { inference } = grpc.loadPackageDefinition(
  loadSync(fileURLToPath(new URL("inference.proto", folder)), { keepCase: true, longs: Number }),
);
const [address, model, clients, requests] = process.argv.slice(2);
const MOST_ELEMENTS = 256;

/** Asks again and again on a connection of its own; returns the latencies in seconds. */
async function work(count, started) {
  // A channel of its own: clients of Node share one by default.
  const options = { "grpc.use_local_subchannel_pool": 1 };
  const client = new inference.GRPCInferenceService(
    address,
    grpc.credentials.createInsecure(),
    options,
  );
  const send = () =>
    new Promise((resolve, reject) => {
      const elements = 1 + Math.floor(Math.random() * MOST_ELEMENTS);
      const content = randomBytes(4 * elements);
      const metadata = new grpc.Metadata();
      const trace = randomBytes(24).toString("hex");
      metadata.set("traceparent", `00-${trace.slice(0, 32)}-${trace.slice(32)}-01`);
      const request = {
        model_name: model,
        id: randomBytes(16).toString("hex"),
        inputs: [{ name: "INPUT0", datatype: "FP32", shape: [elements] }],
        raw_input_contents: [content],
      };
      const deadline = Date.now() + 60000 + Math.random() * 1000;
      client.modelInfer(request, metadata, { deadline }, (error, response) => {
        if (error) reject(error);
        else if (!content.equals(response.raw_output_contents[0])) reject(new Error("wrong"));
        else resolve();
      });
    });
  await send(); // connects
  await started();
  const latencies = [];
  for (let turn = 0; turn < count; turn++) {
    const begin = process.hrtime.bigint();
    await send();
    latencies.push(Number(process.hrtime.bigint() - begin) / 1e9);
  }
  client.close();
  return latencies;
}

let waiting = Number(clients);
let begin;
let open;
const gate = new Promise((resolve) => (open = resolve));
function started() {
  if (--waiting === 0) {
    begin = process.hrtime.bigint();
    open();
  }
  return gate;
}
const all = Array.from({ length: Number(clients) }, () =>
  work(Math.floor(Number(requests) / Number(clients)), started),
);
const latencies = (await Promise.all(all)).flat().sort((one, other) => one - other);
const seconds = Number(process.hrtime.bigint() - begin) / 1e9;
const at = (part) => latencies[Math.floor(part * (latencies.length - 1))] * 1e6;
console.log(JSON.stringify({ rate: latencies.length / seconds, p50: at(0.5), p99: at(0.99) }));
