// Knative's activator, put together as its own cmd/activator does it: request path, throttler, transport, timeouts, reports.
// Only what is around it is not a cluster: what it knows of revisions and their pods comes from the fake API of client-go, as in
// its own tests, its reports go nowhere, and whose request one is says the port instead of a header of an ingress.
package main

import (
	"context"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	nometrics "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	notraces "go.opentelemetry.io/otel/trace/noop"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	netcfg "knative.dev/networking/pkg/config"
	netprobe "knative.dev/networking/pkg/http/probe"
	kubeclient "knative.dev/pkg/client/injection/kube/client"
	_ "knative.dev/pkg/client/injection/kube/informers/core/v1/endpoints/fake"
	_ "knative.dev/pkg/client/injection/kube/informers/core/v1/service/fake"
	"knative.dev/pkg/controller"
	"knative.dev/pkg/injection"
	pkglogging "knative.dev/pkg/logging"
	pkgnet "knative.dev/pkg/network"
	"knative.dev/pkg/ptr"
	activatorconfig "knative.dev/serving/pkg/activator/config"
	activatorhandler "knative.dev/serving/pkg/activator/handler"
	activatornet "knative.dev/serving/pkg/activator/net"
	apiconfig "knative.dev/serving/pkg/apis/config"
	"knative.dev/serving/pkg/apis/serving"
	v1 "knative.dev/serving/pkg/apis/serving/v1"
	asmetrics "knative.dev/serving/pkg/autoscaler/metrics"
	servingclient "knative.dev/serving/pkg/client/injection/client"
	_ "knative.dev/serving/pkg/client/injection/informers/serving/v1/revision/fake"
	pkghttp "knative.dev/serving/pkg/http"
	"knative.dev/serving/pkg/http/handler"
	"knative.dev/serving/pkg/networking"
)

const (
	namespace = "bench"
	// As many at once as Berth's own may have at its one copy.
	slots = 256
)

// What a port is for: a revision of its own, for its protocol is said of the revision.
type side struct {
	revision, protocol, portName string
	listen, upstream             string
}

func main() {
	if len(os.Args) != 5 {
		log.Fatalf("usage: %s REST_LISTEN REST_UPSTREAM GRPC_LISTEN GRPC_UPSTREAM", os.Args[0])
	}
	sides := []side{
		{"rest", "http1", "http", os.Args[1], os.Args[2]},
		{"grpc", "h2c", "http2", os.Args[3], os.Args[4]},
	}
	ctx, informers := injection.Fake.SetupInformers(context.Background(), &rest.Config{})
	for _, one := range sides {
		tell(ctx, one)
	}
	logConfig, err := pkglogging.NewConfigFromMap(map[string]string{})
	check(err)
	logger, _ := pkglogging.NewLoggerFromConfig(logConfig, "activator")
	ctx = pkglogging.WithLogger(ctx, logger)
	// What its SetupObservabilityOrDie makes of a ConfigMap that says nothing: neither metrics nor traces, and headers of both kinds passed on.
	mp, tp := nometrics.NewMeterProvider(), notraces.NewTracerProvider()
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	check(controller.StartInformers(ctx.Done(), informers...))

	transport := pkgnet.NewProxyAutoTransport(1000, 100)
	throttler := activatornet.NewThrottler(ctx, "127.0.0.1")
	// No queue-proxy stands before the upstreams, to answer probes: what is Ready is not probed where there is no mesh.
	go throttler.Run(ctx, transport, false, netcfg.MeshCompatibilityModeDisabled)

	reports := make(chan []asmetrics.StatMessage)
	go func() {
		for range reports {
		}
	}()
	reporter := activatorhandler.NewConcurrencyReporter(ctx, "activator", reports, mp)
	go reporter.Run(ctx.Done())

	ah := activatorhandler.New(ctx, throttler, transport, false, logger, false, tp, mp)
	ah = handler.NewTimeoutHandler(ah, "activator request timeout", timeouts, logger)
	ah = reporter.Handler(ah)
	ah = activatorhandler.NewTracingAttributeHandler(tp, ah)
	ah, err = pkghttp.NewRequestLogHandler(ah, os.Stdout, "", nil, false)
	check(err)
	ah = activatorhandler.NewMetricAttributeHandler("activator", ah)
	ah = activatorhandler.WrapActivatorHandlerWithFullDuplex(ah, logger)
	ah = activatorhandler.NewContextHandler(ctx, ah, activatorconfig.NewStore(logger))
	ah = otelhttp.NewHandler(ah, "handle", otelhttp.WithTracerProvider(tp), otelhttp.WithMeterProvider(mp))
	ah = &activatorhandler.ProbeHandler{NextHandler: ah}
	ah = netprobe.NewHandler(ah)
	ah = &activatorhandler.HealthHandler{HealthCheck: func() error { return nil }, NextHandler: ah, Logger: logger}

	failed := make(chan error)
	for _, one := range sides {
		server := pkgnet.NewServer(one.listen, named(one.revision, ah))
		go func() { failed <- server.ListenAndServe() }()
	}
	log.Fatal(<-failed)
}

// The host name that the revision has in its cluster: the cheapest of the two ways to name it.
func named(revision string, next http.Handler) http.Handler {
	host := revision + "." + namespace + ".svc." + pkgnet.GetClusterDomainName()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Host = host
		next.ServeHTTP(w, r)
	})
}

// As in cmd/activator.
func timeouts(r *http.Request) (time.Duration, time.Duration, time.Duration) {
	if rev := activatorhandler.RevisionFrom(r.Context()); rev != nil {
		responseStart, idle := 0*time.Second, 0*time.Second
		if rev.Spec.ResponseStartTimeoutSeconds != nil {
			responseStart = time.Duration(*rev.Spec.ResponseStartTimeoutSeconds) * time.Second
		}
		if rev.Spec.IdleTimeoutSeconds != nil {
			idle = time.Duration(*rev.Spec.IdleTimeoutSeconds) * time.Second
		}
		return time.Duration(*rev.Spec.TimeoutSeconds) * time.Second, responseStart, idle
	}
	return apiconfig.DefaultRevisionTimeoutSeconds * time.Second,
		apiconfig.DefaultRevisionResponseStartTimeoutSeconds * time.Second,
		apiconfig.DefaultRevisionIdleTimeoutSeconds * time.Second
}

// A revision with one pod that is ready.
func tell(ctx context.Context, one side) {
	host, portText, err := net.SplitHostPort(one.upstream)
	check(err)
	port, err := strconv.ParseInt(portText, 10, 32)
	check(err)
	revision := &v1.Revision{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: one.revision},
		Spec:       v1.RevisionSpec{ContainerConcurrency: ptr.Int64(slots)},
	}
	revision.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: one.protocol}}}}
	revision.SetDefaults(ctx)
	_, err = servingclient.Get(ctx).ServingV1().Revisions(namespace).Create(ctx, revision, metav1.CreateOptions{})
	check(err)
	endpoints := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace,
			Name:      one.revision + "-private",
			Labels: map[string]string{
				serving.RevisionUID:       "u",
				serving.RevisionLabelKey:  one.revision,
				networking.ServiceTypeKey: string(networking.ServiceTypePrivate),
			},
		},
		Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: host}},
			Ports:     []corev1.EndpointPort{{Name: one.portName, Port: int32(port)}},
		}},
	}
	_, err = kubeclient.Get(ctx).CoreV1().Endpoints(namespace).Create(ctx, endpoints, metav1.CreateOptions{})
	check(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
