// Sends requests that differ in all parts with Go's gRPC client; prints seconds and latencies as JSON.
//
//	differing ADDRESS MODEL CLIENTS REQUESTS
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	mathrand "math/rand"
	"os"
	"sort"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	triton "triton/inference"
)

const mostElements = 256

// work asks again and again on a connection of its own; it returns the latencies.
func work(address, model string, count int, ready *sync.WaitGroup, start <-chan struct{}) []time.Duration {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := triton.NewGRPCInferenceServiceClient(connection)
	send := func() {
		elements := 1 + mathrand.Intn(mostElements)
		random := make([]byte, 4*elements+40)
		rand.Read(random)
		content, ids := random[40:], hex.EncodeToString(random[:40])
		trace := fmt.Sprintf("00-%s-%s-01", ids[:32], ids[32:48])
		wait := time.Minute + time.Duration(mathrand.Intn(1000))*time.Millisecond
		deadline, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		response, err := client.ModelInfer(
			metadata.AppendToOutgoingContext(deadline, "traceparent", trace),
			&triton.ModelInferRequest{
				ModelName: model,
				Id:        ids[48:],
				Inputs: []*triton.ModelInferRequest_InferInputTensor{
					{Name: "INPUT0", Datatype: "FP32", Shape: []int64{int64(elements)}},
				},
				RawInputContents: [][]byte{content},
			})
		if err != nil {
			log.Fatal(err)
		}
		if !bytes.Equal(content, response.RawOutputContents[0]) {
			log.Fatal("wrong response")
		}
	}
	send() // connects
	ready.Done()
	<-start
	latencies := make([]time.Duration, count)
	for turn := range latencies {
		begin := time.Now()
		send()
		latencies[turn] = time.Since(begin)
	}
	return latencies
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	clients, requests := number(os.Args[3]), number(os.Args[4])
	var ready, done sync.WaitGroup
	ready.Add(clients)
	done.Add(clients)
	start := make(chan struct{})
	found := make([][]time.Duration, clients)
	for client := range found {
		go func(client int) {
			defer done.Done()
			found[client] = work(os.Args[1], os.Args[2], requests/clients, &ready, start)
		}(client)
	}
	ready.Wait()
	begin := time.Now()
	close(start)
	done.Wait()
	seconds := time.Since(begin).Seconds()
	var latencies []time.Duration
	for _, some := range found {
		latencies = append(latencies, some...)
	}
	sort.Slice(latencies, func(one, other int) bool { return latencies[one] < latencies[other] })
	at := func(part float64) float64 {
		return latencies[int(part*float64(len(latencies)-1))].Seconds() * 1e6
	}
	json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"rate": float64(len(latencies)) / seconds, "p50": at(0.5), "p99": at(0.99),
	})
}
