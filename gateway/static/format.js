// Numbers and times for people.

export function bytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count : count.toFixed(count < 10 ? 1 : 0)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 9.95) return `${value.toFixed(value < 0.995 ? 2 : 1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

/** How long ago, in the coarsest unit that says enough. */
export function ago(ms, nowMs) {
  if (!ms) return "–";
  const s = Math.max(0, (nowMs - ms) / 1000);
  if (s < 5) return "now";
  if (s < 60) return `${Math.floor(s / 5) * 5} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86400)} d ago`;
}

export const moment = (ms) => new Date(ms).toISOString().replace("T", " ").replace(/\.\d+Z$/, "Z");

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
