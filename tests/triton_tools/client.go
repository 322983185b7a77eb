// Calls a server of Triton's gRPC protocol, as Triton's grpc_simple_client.go does.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	triton "triton/inference"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	check(err)
	defer connection.Close()
	client := triton.NewGRPCInferenceServiceClient(connection)
	deadline, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()

	live, err := client.ServerLive(deadline, &triton.ServerLiveRequest{})
	check(err)
	ready, err := client.ServerReady(deadline, &triton.ServerReadyRequest{})
	check(err)
	fmt.Printf("live %t ready %t\n", live.Live, ready.Ready)

	metadata, err := client.ModelMetadata(deadline, &triton.ModelMetadataRequest{Name: "identity_fp32"})
	check(err)
	for _, input := range metadata.Inputs {
		fmt.Printf("input %s %s %v\n", input.Name, input.Datatype, input.Shape)
	}

	raw := make([]byte, 16)
	for i := 0; i < 4; i++ {
		binary.LittleEndian.PutUint32(raw[4*i:], math.Float32bits(float32(i+1)))
	}
	response, err := client.ModelInfer(deadline, &triton.ModelInferRequest{
		ModelName:        "identity_fp32",
		RawInputContents: [][]byte{raw},
		Inputs: []*triton.ModelInferRequest_InferInputTensor{{
			Name: "INPUT0", Datatype: "FP32", Shape: []int64{4}}}})
	check(err)
	fmt.Printf("output %s", response.Outputs[0].Name)
	for i := 0; i < 16; i += 4 {
		fmt.Printf(" %g", math.Float32frombits(binary.LittleEndian.Uint32(response.RawOutputContents[0][i:])))
	}
	fmt.Println()

	stream, err := client.ModelStreamInfer(deadline)
	check(err)
	check(stream.Send(&triton.ModelInferRequest{ModelName: "repeat",
		Inputs: []*triton.ModelInferRequest_InferInputTensor{{
			Name: "COUNT", Datatype: "INT32", Shape: []int64{1},
			Contents: &triton.InferTensorContents{IntContents: []int32{3}}}}}))
	check(stream.CloseSend())
	responses := 0
	for {
		if _, err = stream.Recv(); err == io.EOF {
			break
		}
		check(err)
		responses++
	}
	fmt.Printf("stream %d\n", responses)

	_, err = client.ModelInfer(deadline, &triton.ModelInferRequest{ModelName: "missing"})
	fmt.Printf("error %d %s\n", status.Code(err), status.Convert(err).Message())
}
