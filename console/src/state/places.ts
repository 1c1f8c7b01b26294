/** The part of the address after `#`, which no proxy changes: the screen and its parameters. */

export interface Place {
  screen: string;
  id: string;
  query: URLSearchParams;
}

export function placeOf(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [screen = "", ...rest] = path.split("/");
  return { screen: screen || "runs", id: decodeURIComponent(rest.join("/")), query: new URLSearchParams(query) };
}

export function hashOf(screen: string, id = "", query: Record<string, string> = {}): string {
  const path = id ? `${screen}/${encodeURIComponent(id)}` : screen;
  const text = new URLSearchParams(query).toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}
