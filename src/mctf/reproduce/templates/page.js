// The sliders: every picture shows its patches after the selected block and for the selected r.
for (const viewer of document.querySelectorAll("figure.viewer")) {
  const data = JSON.parse(viewer.querySelector("script.viewer-data").textContent);
  const [block, index] = viewer.querySelectorAll("input[type=range]");
  const output = viewer.querySelector("output");
  const images = viewer.querySelectorAll("img.fused");

  const update = () => {
    const r = data.reductions[index.value];
    const tokens = data.tokens[index.value][block.value - 1];
    const text = `r = ${r}, after block ${block.value}: ${tokens} tokens`;
    block.setAttribute("aria-valuetext", `block ${block.value}`);
    index.setAttribute("aria-valuetext", `r = ${r}`);
    output.textContent = text;
    images.forEach((image, number) => {
      image.src = data.pictures[index.value][number][block.value - 1];
      image.alt = `Image ${number + 1}, ${text}`;
    });
  };
  block.addEventListener("input", update);
  index.addEventListener("input", update);
  update();
}
