// CoreDNS with the plugins that a test cluster needs, and no others: no cache, so that a new name resolves at once.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

// A query passes the plugins in this order.
func init() {
	dnsserver.Directives = []string{"bind", "errors", "ready", "kubernetes"}
}

func main() {
	coremain.Run()
}
