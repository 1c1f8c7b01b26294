// Package ecs stands in for Traefik's package of that name, which finds routes in Amazon's container service. A test
// cluster has its routes from Kubernetes, and the client of EC2 alone takes longer to compile than all of Traefik's own
// packages.
package ecs

import (
	"errors"

	"github.com/traefik/traefik/v3/pkg/config/dynamic"
	"github.com/traefik/traefik/v3/pkg/safe"
)

// Provider has no options, so that a configuration with any is refused.
type Provider struct{}

// SetDefaults is called by the decoder of Traefik's configuration.
func (*Provider) SetDefaults() {}

// Init refuses to start.
func (*Provider) Init() error {
	return errors.New("this Traefik was built without its ECS provider")
}

// Provide is never reached: Init fails first.
func (*Provider) Provide(chan<- dynamic.Message, *safe.Pool) error {
	return nil
}
