// Calls an external scaler as KEDA does, with KEDA's own client: one JSON object a line in, answers as they come.
//
//	{"id": 1, "op": "spec"|"metrics"|"active"|"stream"|"specs"|"close", "name", "namespace", "metadata", "metric"}
//
// An answer has the line's id, and what was answered or `code` and `message`. Of a stream every message is an answer, and
// its end is one: code "OK" where the server ended it in peace. "close" ends the stream of that id.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log"
	"os"
	"sync"

	pb "github.com/kedacore/keda/v2/pkg/scalers/externalscaler"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

type question struct {
	ID        int               `json:"id"`
	Op        string            `json:"op"`
	Name      string            `json:"name"`
	Namespace string            `json:"namespace"`
	Metadata  map[string]string `json:"metadata"`
	Metric    string            `json:"metric"`
}

type answer struct {
	ID      int                `json:"id"`
	Active  *bool              `json:"active,omitempty"`
	Metrics map[string]float64 `json:"metrics,omitempty"`
	Code    string             `json:"code,omitempty"`
	Message string             `json:"message,omitempty"`
}

var (
	mutex   sync.Mutex
	streams = map[int]context.CancelFunc{}
)

func main() {
	address := flag.String("address", "", "HOST:PORT")
	ca := flag.String("ca", "", "the server's authority, for TLS")
	cert := flag.String("cert", "", "a client certificate")
	key := flag.String("key", "", "its key")
	flag.Parse()
	// As KEDA's connection pool has it.
	connection, err := grpc.NewClient(*address,
		grpc.WithTransportCredentials(transport(*ca, *cert, *key)),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin":{}}]}`))
	if err != nil {
		log.Fatal(err)
	}
	client := pb.NewExternalScalerClient(connection)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var asked question
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			log.Fatal(err)
		}
		ask(client, asked)
	}
}

func transport(ca, cert, key string) credentials.TransportCredentials {
	if ca == "" {
		return insecure.NewCredentials()
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		log.Fatal(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(pem)
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			log.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config)
}

func ask(client pb.ExternalScalerClient, asked question) {
	ctx := context.Background()
	ref := &pb.ScaledObjectRef{Name: asked.Name, Namespace: asked.Namespace, ScalerMetadata: asked.Metadata}
	switch asked.Op {
	case "spec":
		told, err := client.GetMetricSpec(ctx, ref)
		say(asked.ID, err, answer{Metrics: targets(told)})
	case "metrics":
		told, err := client.GetMetrics(ctx, &pb.GetMetricsRequest{ScaledObjectRef: ref, MetricName: asked.Metric})
		say(asked.ID, err, answer{Metrics: values(told)})
	case "active":
		told, err := client.IsActive(ctx, ref)
		active := told.GetResult()
		say(asked.ID, err, answer{Active: &active})
	case "stream":
		ctx := opened(asked.ID)
		stream, err := client.StreamIsActive(ctx, ref)
		go follow(asked.ID, err, func() (answer, error) {
			told, err := stream.Recv()
			active := told.GetResult()
			return answer{Active: &active}, err
		})
	case "specs":
		ctx := opened(asked.ID)
		stream, err := client.StreamMetricSpec(ctx, ref)
		go follow(asked.ID, err, func() (answer, error) {
			told, err := stream.Recv()
			return answer{Metrics: targets(told)}, err
		})
	case "close":
		mutex.Lock()
		cancel := streams[asked.ID]
		mutex.Unlock()
		cancel()
	default:
		log.Fatalf("%q is no question", asked.Op)
	}
}

func opened(id int) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	mutex.Lock()
	streams[id] = cancel
	mutex.Unlock()
	return ctx
}

func follow(id int, err error, next func() (answer, error)) {
	for err == nil {
		var told answer
		if told, err = next(); err == nil {
			say(id, nil, told)
		}
	}
	if errors.Is(err, io.EOF) {
		say(id, nil, answer{Code: "OK"})
		return
	}
	say(id, err, answer{})
}

// As KEDA builds the HPA from it.
func targets(told *pb.GetMetricSpecResponse) map[string]float64 {
	found := map[string]float64{}
	for _, spec := range told.GetMetricSpecs() {
		found[spec.MetricName] = float64(spec.TargetSize)
		if spec.TargetSizeFloat > 0 {
			found[spec.MetricName] = spec.TargetSizeFloat
		}
	}
	return found
}

// As KEDA reads them for the HPA.
func values(told *pb.GetMetricsResponse) map[string]float64 {
	found := map[string]float64{}
	for _, value := range told.GetMetricValues() {
		found[value.MetricName] = float64(value.MetricValue)
		if value.MetricValueFloat > 0 {
			found[value.MetricName] = value.MetricValueFloat
		}
	}
	return found
}

func say(id int, err error, told answer) {
	told.ID = id
	if err != nil {
		told = answer{ID: id, Code: status.Code(err).String(), Message: status.Convert(err).Message()}
	}
	line, err := json.Marshal(told)
	if err != nil {
		log.Fatal(err)
	}
	mutex.Lock()
	defer mutex.Unlock()
	os.Stdout.Write(append(line, '\n'))
}
