// Draws the plots of a report, and says which unit is under the mouse.
const plots = JSON.parse(document.getElementById("plots").textContent);
const settings = {responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]};
for (const [name, figure] of Object.entries(plots)) {
  Plotly.newPlot(name, figure.data, figure.layout, settings);
}
const classes = JSON.parse(document.getElementById("classes").textContent);
const shown = document.getElementById("unit");
document.getElementById("timeline")?.on?.("plotly_hover", event => {
  const point = event.points[0];
  if (point.z !== undefined) {
    const name = point.z ? classes[point.z - 1] : "idle";
    shown.textContent = `${point.y} at ${point.x.toFixed(2)} s: ${name}`;
  }
});
