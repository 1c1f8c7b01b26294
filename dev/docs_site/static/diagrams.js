"use strict";
// Draws each diagram of the page. The colours follow the theme that the reader's browser prefers.
mermaid.initialize({
  startOnLoad: true,
  securityLevel: "strict",
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "neutral",
});
