import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GrpcService.InferTensorContents;
import inference.GrpcService.ModelInferRequest;
import inference.GrpcService.ModelInferResponse;
import inference.GrpcService.ModelMetadataRequest;
import inference.GrpcService.ModelStreamInferResponse;
import inference.GrpcService.ServerLiveRequest;
import inference.GrpcService.ServerReadyRequest;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.StreamObserver;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Calls a server of Triton's gRPC protocol, as Triton's SimpleJavaClient does. */
public class Client {
  public static void main(String[] arguments) throws InterruptedException {
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub stub =
        GRPCInferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(60, TimeUnit.SECONDS);
    System.out.println(
        "live " + stub.serverLive(ServerLiveRequest.getDefaultInstance()).getLive()
            + " ready " + stub.serverReady(ServerReadyRequest.getDefaultInstance()).getReady());
    stub.modelMetadata(ModelMetadataRequest.newBuilder().setName("identity_fp32").build())
        .getInputsList()
        .forEach(input -> System.out.println("input " + input.getName() + " "
            + input.getDatatype() + " [" + input.getShape(0) + "]"));

    ByteBuffer numbers = ByteBuffer.allocate(16).order(ByteOrder.LITTLE_ENDIAN);
    for (int i = 1; i <= 4; i++) {
      numbers.putFloat(i);
    }
    ModelInferResponse response = stub.modelInfer(ModelInferRequest.newBuilder()
        .setModelName("identity_fp32")
        .addInputs(ModelInferRequest.InferInputTensor.newBuilder()
            .setName("INPUT0").setDatatype("FP32").addShape(4))
        .addRawInputContents(ByteString.copyFrom(numbers.array()))
        .build());
    ByteBuffer values = response.getRawOutputContents(0).asReadOnlyByteBuffer()
        .order(ByteOrder.LITTLE_ENDIAN);
    StringBuilder line = new StringBuilder("output " + response.getOutputs(0).getName());
    while (values.hasRemaining()) {
      line.append(" ").append((int) values.getFloat());
    }
    System.out.println(line);

    CountDownLatch ended = new CountDownLatch(1);
    AtomicInteger responses = new AtomicInteger();
    StreamObserver<ModelInferRequest> requests = GRPCInferenceServiceGrpc.newStub(channel)
        .withDeadlineAfter(60, TimeUnit.SECONDS)
        .modelStreamInfer(new StreamObserver<ModelStreamInferResponse>() {
          @Override public void onNext(ModelStreamInferResponse next) {
            responses.incrementAndGet();
          }

          @Override public void onError(Throwable error) {
            System.err.println(error);
            ended.countDown();
          }

          @Override public void onCompleted() {
            ended.countDown();
          }
        });
    requests.onNext(ModelInferRequest.newBuilder().setModelName("repeat")
        .addInputs(ModelInferRequest.InferInputTensor.newBuilder()
            .setName("COUNT").setDatatype("INT32").addShape(1)
            .setContents(InferTensorContents.newBuilder().addIntContents(3)))
        .build());
    requests.onCompleted();
    ended.await(60, TimeUnit.SECONDS);
    System.out.println("stream " + responses);

    try {
      stub.modelInfer(ModelInferRequest.newBuilder().setModelName("missing").build());
    } catch (StatusRuntimeException error) {
      System.out.println("error " + error.getStatus().getCode().value() + " "
          + error.getStatus().getDescription());
    }
    channel.shutdownNow();
  }
}
