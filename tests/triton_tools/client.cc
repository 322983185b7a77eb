// Calls a server of Triton's gRPC protocol, as Triton's simple_grpc_infer_client.cc does.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "grpc_service.grpc.pb.h"

static void Limit(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

static void Check(const grpc::Status& status) {
  if (!status.ok()) {
    std::cerr << status.error_message() << std::endl;
    std::exit(1);
  }
}

int main(int, char** arguments) {
  auto stub = inference::GRPCInferenceService::NewStub(
      grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials()));
  std::cout << std::boolalpha;
  {
    inference::ServerLiveResponse live;
    inference::ServerReadyResponse ready;
    grpc::ClientContext first, second;
    Limit(&first), Limit(&second);
    Check(stub->ServerLive(&first, {}, &live));
    Check(stub->ServerReady(&second, {}, &ready));
    std::cout << "live " << live.live() << " ready " << ready.ready() << "\n";
  }
  {
    inference::ModelMetadataRequest request;
    inference::ModelMetadataResponse metadata;
    grpc::ClientContext context;
    Limit(&context);
    request.set_name("identity_fp32");
    Check(stub->ModelMetadata(&context, request, &metadata));
    for (const auto& input : metadata.inputs()) {
      std::cout << "input " << input.name() << " " << input.datatype() << " [" << input.shape(0)
                << "]\n";
    }
  }
  {
    const float numbers[] = {1, 2, 3, 4};
    inference::ModelInferRequest request;
    inference::ModelInferResponse response;
    grpc::ClientContext context;
    Limit(&context);
    request.set_model_name("identity_fp32");
    auto* input = request.add_inputs();
    input->set_name("INPUT0");
    input->set_datatype("FP32");
    input->add_shape(4);
    request.add_raw_input_contents(numbers, sizeof(numbers));
    Check(stub->ModelInfer(&context, request, &response));
    float values[4];
    std::memcpy(values, response.raw_output_contents(0).data(), sizeof(values));
    std::cout << "output " << response.outputs(0).name();
    for (float value : values) std::cout << " " << value;
    std::cout << "\n";
  }
  {
    inference::ModelInferRequest request;
    inference::ModelStreamInferResponse response;
    grpc::ClientContext context;
    Limit(&context);
    request.set_model_name("repeat");
    auto* input = request.add_inputs();
    input->set_name("COUNT");
    input->set_datatype("INT32");
    input->add_shape(1);
    input->mutable_contents()->add_int_contents(3);
    auto stream = stub->ModelStreamInfer(&context);
    stream->Write(request);
    stream->WritesDone();
    int responses = 0;
    while (stream->Read(&response)) responses++;
    Check(stream->Finish());
    std::cout << "stream " << responses << "\n";
  }
  inference::ModelInferRequest request;
  inference::ModelInferResponse response;
  grpc::ClientContext context;
  Limit(&context);
  request.set_model_name("missing");
  const auto status = stub->ModelInfer(&context, request, &response);
  std::cout << "error " << status.error_code() << " " << status.error_message() << std::endl;
}
