// Knative's own decider behind JSON lines: one object a line, its kind in "op", one line of answer to each but
// "stat". What is asked for here is what `berth scaler --replay` answers, and a little more.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"os"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric/noop"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"knative.dev/serving/pkg/apis/autoscaling"
	"knative.dev/serving/pkg/apis/autoscaling/v1alpha1"
	"knative.dev/serving/pkg/autoscaler/aggregation"
	"knative.dev/serving/pkg/autoscaler/config"
	"knative.dev/serving/pkg/autoscaler/metrics"
	"knative.dev/serving/pkg/autoscaler/scaling"
	kpa "knative.dev/serving/pkg/reconciler/autoscaling/kpa/resources"
	pares "knative.dev/serving/pkg/reconciler/autoscaling/resources"
)

const namespace = "models"

type request struct {
	Op                   string            `json:"op"`
	ID                   string            `json:"id"`
	T                    float64           `json:"t"`
	Ready                int               `json:"ready"`
	Config               map[string]string `json:"config"`
	Annotations          map[string]string `json:"annotations"`
	ContainerConcurrency int64             `json:"containerConcurrency"`
	Unreachable          bool              `json:"unreachable"`
	Scrape               bool              `json:"scrape"`
	C                    float64           `json:"c"`
	PC                   float64           `json:"pc"`
	N                    float64           `json:"n"`
	PN                   float64           `json:"pn"`
}

type model struct {
	scaler scaling.UniScaler
	ready  int
}

func (m *model) ReadyCount() (int, error)    { return m.ready, nil }
func (m *model) NotReadyCount() (int, error) { return 0, nil }

type oracle struct {
	logger    *zap.SugaredLogger
	collector *metrics.MetricCollector
	models    map[string]*model
}

func main() {
	logger := zap.NewNop().Sugar()
	scrapeNothing := func(*v1alpha1.Metric, *zap.SugaredLogger) (metrics.StatsScraper, error) { return nil, nil }
	o := &oracle{
		logger:    logger,
		collector: metrics.NewMetricCollector(scrapeNothing, logger),
		models:    map[string]*model{},
	}
	// By lines: a json.Decoder keeps the newline in its buffer, and then nobody knows when to flush.
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := bufio.NewWriterSize(os.Stdout, 1<<20)
	answers := json.NewEncoder(out)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			out.Flush()
			return
		}
		var asked request
		if err := json.Unmarshal(line, &asked); err != nil {
			log.Fatalf("%s: %v", line, err)
		}
		if answer := o.answer(&asked); answer != nil {
			if err := answers.Encode(answer); err != nil {
				log.Fatal(err)
			}
		}
		if lines.Buffered() == 0 {
			out.Flush()
		}
	}
}

func (o *oracle) answer(asked *request) map[string]any {
	now := timeOf(asked.T)
	// The only two places of the decider that read the wall clock read this one: see ../oracle.py.
	aggregation.Now = func() time.Time { return now }
	scaling.Now = aggregation.Now
	switch asked.Op {
	case "new", "update":
		return o.configured(asked)
	case "stat":
		o.collector.Record(key(asked.ID), now, metrics.Stat{
			AverageConcurrentRequests:        asked.C,
			AverageProxiedConcurrentRequests: asked.PC,
			RequestCount:                     asked.N,
			ProxiedRequestCount:              asked.PN,
		})
		return nil
	case "scale":
		return o.scale(asked, now)
	case "del":
		o.remove(asked.ID)
		return map[string]any{}
	}
	return failed(fmt.Errorf("%q is no op", asked.Op))
}

func (o *oracle) configured(asked *request) map[string]any {
	cfg, err := config.NewConfigFromMap(asked.Config)
	if err != nil {
		return failed(err)
	}
	if err := autoscaling.ValidateAnnotations(context.Background(), cfg, asked.Annotations); err != nil {
		return failed(err)
	}
	pa := &v1alpha1.PodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: asked.ID, Annotations: asked.Annotations},
		Spec:       v1alpha1.PodAutoscalerSpec{ContainerConcurrency: asked.ContainerConcurrency},
	}
	if asked.Unreachable {
		pa.Spec.Reachability = v1alpha1.ReachabilityUnreachable
	}
	target := ""
	if asked.Scrape {
		target = "scraped"
	}
	decider, metric := kpa.MakeDecider(pa, cfg), pares.MakeMetric(pa, target, cfg)
	if asked.Op == "new" {
		o.remove(asked.ID)
		one := &model{ready: asked.Ready}
		one.scaler = scaling.New(*attribute.EmptySet(), noop.NewMeterProvider(), namespace, asked.ID,
			o.collector, one, &decider.Spec)
		o.models[asked.ID] = one
	} else if one, there := o.models[asked.ID]; there {
		one.scaler.Update(&decider.Spec)
	} else {
		return failed(fmt.Errorf("there is no %q", asked.ID))
	}
	if err := o.collector.CreateOrUpdate(metric); err != nil {
		return failed(err)
	}
	minimum, maximum := pa.ScaleBounds(cfg)
	return map[string]any{
		"metric": decider.Spec.ScalingMetric,
		"numbers": [6]string{
			bits(decider.Spec.TargetValue), bits(decider.Spec.TotalValue), bits(decider.Spec.TargetBurstCapacity),
			bits(decider.Spec.PanicThreshold), bits(decider.Spec.MaxScaleUpRate), bits(decider.Spec.MaxScaleDownRate),
		},
		"windows":   [3]time.Duration{metric.Spec.StableWindow, metric.Spec.PanicWindow, decider.Spec.ScaleDownDelay},
		"scales":    [4]int32{decider.Spec.InitialScale, decider.Spec.ActivationScale, minimum, maximum},
		"algorithm": metric.AggregationAlgorithm(),
	}
}

func (o *oracle) remove(id string) {
	if _, there := o.models[id]; there {
		o.collector.Delete(namespace, id) // and with it a goroutine
		delete(o.models, id)
	}
}

func (o *oracle) scale(asked *request, now time.Time) map[string]any {
	one, there := o.models[asked.ID]
	if !there {
		return failed(fmt.Errorf("there is no %q", asked.ID))
	}
	one.ready = asked.Ready
	result := one.scaler.Scale(o.logger, now)
	stable, panicking, _ := o.collector.StableAndPanicConcurrency(key(asked.ID), now)
	stableRPS, panickingRPS, _ := o.collector.StableAndPanicRPS(key(asked.ID), now)
	return map[string]any{
		"valid":    result.ScaleValid,
		"desired":  result.DesiredPodCount,
		"ebc":      result.ExcessBurstCapacity,
		"in_panic": scaling.InPanic(one.scaler),
		"averages": [4]string{bits(stable), bits(panicking), bits(stableRPS), bits(panickingRPS)},
	}
}

// bits tells a number to its last bit, whatever number it is.
func bits(x float64) string { return fmt.Sprintf("%016x", math.Float64bits(x)) }

func key(id string) types.NamespacedName { return types.NamespacedName{Namespace: namespace, Name: id} }

// timeOf splits before it multiplies: 1e9 times a time of today has no nanoseconds left.
func timeOf(t float64) time.Time {
	seconds, rest := math.Modf(t)
	return time.Unix(int64(seconds), int64(math.Round(rest*1e9)))
}

func failed(err error) map[string]any { return map[string]any{"err": err.Error()} }
