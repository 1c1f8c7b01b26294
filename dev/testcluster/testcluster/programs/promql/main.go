// Reads rules, expressions and made-up series from standard input, and says of each expression what it reads and what it
// gives. What does not parse, a template of an annotation included, is an error.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/tsdb"
)

// Series are in the notation of Prometheus's own rule tests: `up{job="a"} 1 1 0x5`, one value per interval.
type question struct {
	Rules           json.RawMessage `json:"rules"`
	Series          []string        `json:"series"`
	IntervalSeconds int64           `json:"interval_seconds"`
	AtSeconds       int64           `json:"at_seconds"`
	Expressions     []string        `json:"expressions"`
}

type answer struct {
	Selectors []selector `json:"selectors"`
	Samples   []sample   `json:"samples"`
}

// Matchers are the labels that choose series, by name.
type selector struct {
	Metric   string            `json:"metric"`
	Matchers map[string]string `json:"matchers"`
}

type sample struct {
	Labels map[string]string `json:"labels"`
	Value  float64           `json:"value"`
}

func main() {
	answers, err := answers()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(answers)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func answers() ([]answer, error) {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return nil, err
	}
	if err := check(asked.Rules); err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "promql-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	store, err := tsdb.Open(folder, nil, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		return nil, err
	}
	defer store.Close()
	if err := load(store, asked.Series, asked.IntervalSeconds); err != nil {
		return nil, err
	}
	return evaluate(store, asked.Expressions, time.Unix(asked.AtSeconds, 0))
}

func check(rules json.RawMessage) error {
	if rules == nil {
		return nil
	}
	_, errs := rulefmt.Parse(rules, false, model.UTF8Validation)
	for _, err := range errs {
		return err
	}
	return nil
}

func load(store *tsdb.DB, series []string, intervalSeconds int64) error {
	appender := store.Appender(context.Background())
	for _, written := range series {
		name, values, err := parser.ParseSeriesDesc(written)
		if err != nil {
			return fmt.Errorf("%s: %w", written, err)
		}
		for number, value := range values {
			if value.Omitted {
				continue
			}
			milliseconds := int64(number) * intervalSeconds * 1000
			if _, err := appender.Append(0, name, milliseconds, value.Value); err != nil {
				return fmt.Errorf("%s: %w", written, err)
			}
		}
	}
	return appender.Commit()
}

func evaluate(store *tsdb.DB, expressions []string, at time.Time) ([]answer, error) {
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute})
	defer engine.Close()
	answers := []answer{}
	for _, expression := range expressions {
		selectors, err := selectorsOf(expression)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", expression, err)
		}
		query, err := engine.NewInstantQuery(context.Background(), store, nil, expression, at)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", expression, err)
		}
		vector, err := query.Exec(context.Background()).Vector()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", expression, err)
		}
		samples := []sample{}
		for _, each := range vector {
			samples = append(samples, sample{Labels: each.Metric.Map(), Value: each.F})
		}
		answers = append(answers, answer{Selectors: selectors, Samples: samples})
	}
	return answers, nil
}

func selectorsOf(expression string) ([]selector, error) {
	parsed, err := parser.ParseExpr(expression)
	if err != nil {
		return nil, err
	}
	found := []selector{}
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		if each, is := node.(*parser.VectorSelector); is {
			matchers := map[string]string{}
			for _, matcher := range each.LabelMatchers {
				if matcher.Name != labels.MetricName {
					matchers[matcher.Name] = matcher.Value
				}
			}
			found = append(found, selector{Metric: each.Name, Matchers: matchers})
		}
		return nil
	})
	return found, nil
}
