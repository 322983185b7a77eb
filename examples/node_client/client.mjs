// Sends a batch of vectors, a request that fails, and a word whose letters come back as a stream.

import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const { inference } = grpc.loadPackageDefinition(
  loadSync(fileURLToPath(new URL("inference.proto", import.meta.url)), {
    keepCase: true,
    longs: Number,
  }),
);
const client = new inference.GRPCInferenceService(
  "localhost:8001",
  grpc.credentials.createInsecure(),
);
const modelInfer = promisify(client.modelInfer).bind(client);

/** Options of a call that must end within a minute. */
const soon = () => ({ deadline: Date.now() + 60000 });

/** A request with rows of numbers for each input. */
function floats(model, inputs) {
  return {
    model_name: model,
    inputs: Object.entries(inputs).map(([name, rows]) => ({
      name,
      datatype: "FP32",
      shape: [rows.length, rows[0].length],
    })),
    raw_input_contents: Object.values(inputs).map((rows) =>
      Buffer.from(Float32Array.from(rows.flat()).buffer),
    ),
  };
}

/** Strings as the protocol has them: each after its length. */
function encodeStrings(strings) {
  return Buffer.concat(
    strings.flatMap((text) => {
      const length = Buffer.alloc(4);
      length.writeUInt32LE(Buffer.byteLength(text));
      return [length, Buffer.from(text)];
    }),
  );
}

function* decodeStrings(bytes) {
  for (let at = 0; at < bytes.length; ) {
    const end = at + 4 + bytes.readUInt32LE(at);
    yield bytes.toString("utf8", at + 4, end);
    at = end;
  }
}

const vectors = { A: [[1, 2, 3], [1, 0, 0]], B: [[2, 4, 6], [0, 5, 0]] };
const response = await modelInfer(floats("similarity", vectors), soon());
const cosines = response.outputs[0].shape[0];
const raw = response.raw_output_contents[0];
console.log(Array.from({ length: cosines }, (_, row) => raw.readFloatLE(4 * row).toFixed(2)));

try {
  await modelInfer(floats("similar", vectors), soon());
} catch (error) {
  console.log(grpc.status[error.code], error.details);
}

const stream = client.modelStreamInfer(soon());
stream.write({
  model_name: "spell",
  inputs: [{ name: "WORD", datatype: "BYTES", shape: [1] }],
  raw_input_contents: [encodeStrings(["Grüße"])],
});
stream.end(); // no more requests; the responses follow
const letters = [];
for await (const { error_message, infer_response } of stream) {
  if (error_message) throw new Error(error_message);
  letters.push(...decodeStrings(infer_response.raw_output_contents[0]));
}
console.log(letters.join(" "));

client.close();
