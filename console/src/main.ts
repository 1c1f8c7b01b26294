import { mount } from "svelte";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import App from "./App.svelte";

const target = document.getElementById("console");
if (target === null) throw new Error("index.html has no element with the id console");
mount(App, { target });
