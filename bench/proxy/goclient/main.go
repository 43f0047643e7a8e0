// A client of Triton's gRPC API as programs in Go are: many connections, each with its windows and unique headers.
//
// It asks the same call again and again, by grpc-go, by connect-go or by x/net's HTTP/2 alone, and prints one JSON
// object of what came of it. Messages are bytes that it neither knows nor reads.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

type options struct {
	kind, address, method, body string
	connections, streams, calls int
	seconds, deadline, delay    time.Duration
	window                      int
	traceparent, jitter, drop   bool
}

// One call: the size of its answer, or how it failed.
type caller func(ctx context.Context, traceparent string) (int, error)

// What came of all calls. Late: those that had not ended a second after their deadline.
type result struct {
	Done    int            `json:"done"`
	Codes   map[string]int `json:"codes"`
	Errors  []string       `json:"errors"`
	Bytes   int64          `json:"bytes"`
	Largest int            `json:"largest"`
	Late    int            `json:"late"`
	P50     int64          `json:"p50_us"`
	P99     int64          `json:"p99_us"`
	Seconds float64        `json:"seconds"`
}

func main() {
	var o options
	flag.StringVar(&o.kind, "kind", "grpc", "grpc, connect or http2")
	flag.StringVar(&o.address, "address", "127.0.0.1:8001", "HOST:PORT")
	flag.StringVar(&o.method, "method", "/inference.GRPCInferenceService/ModelInfer", "the full name of a unary method")
	flag.StringVar(&o.body, "body", "", "a file with the message")
	flag.IntVar(&o.connections, "connections", 1, "")
	flag.IntVar(&o.streams, "streams", 1, "calls at once on each connection")
	flag.IntVar(&o.calls, "calls", 0, "calls of each stream; 0: for -seconds")
	flag.DurationVar(&o.seconds, "seconds", time.Second, "how long, where -calls is 0")
	flag.DurationVar(&o.deadline, "deadline", 0, "of each call; the rest of it is sent in a different form each time")
	flag.BoolVar(&o.jitter, "jitter", false, "the deadline is anything up to -deadline")
	flag.BoolVar(&o.traceparent, "traceparent", false, "a new one with each call")
	flag.IntVar(&o.window, "window", 0, "fixed windows of so many bytes, of stream and connection")
	flag.DurationVar(&o.delay, "delay", 0, "http2 only: rest between two reads of 64 KiB")
	flag.BoolVar(&o.drop, "drop", false, "http2 only: each answer is left after its first bytes")
	flag.Parse()
	message, err := os.ReadFile(o.body)
	if err != nil {
		log.Fatal(err)
	}
	json.NewEncoder(os.Stdout).Encode(run(&o, message))
}

func run(o *options, message []byte) result {
	var (
		mutex sync.Mutex
		group sync.WaitGroup
		total = result{Codes: map[string]int{}}
		took  []time.Duration
	)
	began := time.Now()
	for range o.connections {
		call, closing := connection(o, message)
		defer closing()
		for range o.streams {
			group.Add(1)
			go func() {
				defer group.Done()
				for n := 0; o.calls == 0 && time.Since(began) < o.seconds || n < o.calls; n++ {
					size, err, seconds, late := once(o, call)
					mutex.Lock()
					total.add(size, err, late)
					took = append(took, seconds)
					mutex.Unlock()
				}
			}()
		}
	}
	group.Wait()
	total.Seconds = time.Since(began).Seconds()
	if sort.Slice(took, func(i, j int) bool { return took[i] < took[j] }); len(took) > 0 {
		total.P50, total.P99 = took[len(took)/2].Microseconds(), took[len(took)*99/100].Microseconds()
	}
	return total
}

func once(o *options, call caller) (int, error, time.Duration, bool) {
	ctx, limit := context.Background(), o.deadline
	if limit > 0 {
		if o.jitter {
			limit = time.Duration(rand.Int64N(int64(limit))) + time.Millisecond
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	trace := ""
	if o.traceparent {
		trace = fmt.Sprintf("00-%016x%016x-%016x-01", rand.Uint64(), rand.Uint64(), rand.Uint64())
	}
	began := time.Now()
	size, err := call(ctx, trace)
	took := time.Since(began)
	return size, err, took, limit > 0 && took > limit+time.Second
}

func (r *result) add(size int, err error, late bool) {
	r.Done++
	r.Bytes += int64(size)
	r.Largest = max(r.Largest, size)
	r.Codes[codeOf(err)]++
	if err != nil && len(r.Errors) < 5 {
		r.Errors = append(r.Errors, err.Error())
	}
	if late {
		r.Late++
	}
}

func codeOf(err error) string {
	var refused *connect.Error
	switch {
	case err == nil:
		return "OK"
	case errors.As(err, &refused):
		return refused.Code().String()
	case errors.Is(err, context.DeadlineExceeded):
		return "DeadlineExceeded"
	}
	return status.Code(err).String()
}

func connection(o *options, message []byte) (caller, func()) {
	switch o.kind {
	case "grpc":
		return byGRPC(o, message)
	case "connect":
		return byConnect(o, message)
	case "http2":
		return byHTTP2(o, message)
	}
	log.Fatalf("no -kind %s", o.kind)
	return nil, nil
}

// What a message is to a client that does not look into it. A copy, since connect keeps what it is given.
type plain struct{}

func (plain) Name() string                      { return "proto" }
func (plain) Marshal(value any) ([]byte, error) { return bytes.Clone(*value.(*[]byte)), nil }
func (plain) Unmarshal(data []byte, value any) error {
	*value.(*[]byte) = bytes.Clone(data)
	return nil
}

func byGRPC(o *options, message []byte) (caller, func()) {
	set := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(plain{}), grpc.MaxCallRecvMsgSize(1<<31-1)),
	}
	if o.window > 0 {
		set = append(set, grpc.WithInitialWindowSize(int32(o.window)), grpc.WithInitialConnWindowSize(int32(o.window)))
	}
	channel, err := grpc.NewClient("passthrough:///"+o.address, set...)
	if err != nil {
		log.Fatal(err)
	}
	return func(ctx context.Context, trace string) (int, error) {
		if trace != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", trace)
		}
		var answer []byte
		err := channel.Invoke(ctx, o.method, &message, &answer)
		return len(answer), err
	}, func() { channel.Close() }
}

func transport() *http2.Transport {
	return &http2.Transport{
		AllowHTTP: true,
		DialTLSContext: func(ctx context.Context, network, address string, _ *tls.Config) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	}
}

func byConnect(o *options, message []byte) (caller, func()) {
	by := transport()
	client := connect.NewClient[[]byte, []byte](
		&http.Client{Transport: by}, "http://"+o.address+o.method, connect.WithGRPC(), connect.WithCodec(plain{}),
	)
	return func(ctx context.Context, trace string) (int, error) {
		request := connect.NewRequest(&message)
		if trace != "" {
			request.Header().Set("traceparent", trace)
		}
		answer, err := client.CallUnary(ctx, request)
		if err != nil {
			return 0, err
		}
		return len(*answer.Msg), nil
	}, by.CloseIdleConnections
}

func byHTTP2(o *options, message []byte) (caller, func()) {
	framed := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	framed = append(framed, message...)
	by := transport()
	return func(ctx context.Context, trace string) (int, error) {
		request, err := http.NewRequestWithContext(ctx, "POST", "http://"+o.address+o.method, bytes.NewReader(framed))
		if err != nil {
			return 0, err
		}
		request.Header.Set("content-type", "application/grpc")
		request.Header.Set("te", "trailers")
		if deadline, ok := ctx.Deadline(); ok {
			request.Header.Set("grpc-timeout", fmt.Sprintf("%du", max(1, time.Until(deadline).Microseconds())))
		}
		if trace != "" {
			request.Header.Set("traceparent", trace)
		}
		answer, err := by.RoundTrip(request)
		if err != nil {
			return 0, err
		}
		defer answer.Body.Close()
		size, err := read(answer.Body, o)
		if err == nil && !o.drop {
			err = statusOf(answer)
		}
		return max(0, size-5), err
	}, by.CloseIdleConnections
}

func read(body io.Reader, o *options) (int, error) {
	if o.delay == 0 && !o.drop {
		size, err := io.Copy(io.Discard, body)
		return int(size), err
	}
	block := make([]byte, 64*1024)
	for size := 0; ; {
		n, err := body.Read(block)
		if size += n; err == io.EOF || err == nil && o.drop {
			return size, nil
		} else if err != nil {
			return size, err
		}
		time.Sleep(o.delay)
	}
}

func statusOf(answer *http.Response) error {
	status := answer.Trailer.Get("grpc-status") + answer.Header.Get("grpc-status")
	if answer.StatusCode == 200 && status == "0" {
		return nil
	}
	words := answer.Trailer.Get("grpc-message") + answer.Header.Get("grpc-message")
	return fmt.Errorf("%s, grpc-status %q: %s", answer.Status, status, strings.TrimSpace(words))
}
