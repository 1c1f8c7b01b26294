import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

const SERVER = "http://127.0.0.1:8000";

export default defineConfig({
  // Relative addresses also work behind a proxy that serves the console below a path.
  base: "./",
  plugins: [svelte()],
  build: {
    outDir: "../api_server/tinsmith_server/console_bundle",
    emptyOutDir: true,
    target: ["chrome123", "firefox120", "safari17.5"],
    // The server's policy permits files of its own address only, so nothing may be inlined as a data: address.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    license: { fileName: "LICENSES.txt" },
  },
  server: {
    // `npm run dev` serves the sources, and forwards all calls to `tinsmith serve` on this machine.
    proxy: Object.fromEntries(
      ["/api", "/oai", "/console/session", "/docs", "/openapi.json"].map((path) => [path, SERVER]),
    ),
  },
  test: { include: ["tests/**/*.test.ts"] },
});
