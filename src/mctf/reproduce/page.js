// The sliders: whichever is moved, every picture shows its patches after that block and for that r.
for (const viewer of document.querySelectorAll("figure.viewer")) {
  const known = JSON.parse(viewer.querySelector("script.viewer-data").textContent);
  const [block, place] = viewer.querySelectorAll("input[type=range]");
  const output = viewer.querySelector("output");
  const images = viewer.querySelectorAll("img.fused");

  const show = () => {
    const r = known.reductions[place.value];
    const tokens = known.tokens[place.value][block.value - 1];
    const words = `r = ${r}, after block ${block.value}: ${tokens} tokens are left`;
    block.setAttribute("aria-valuetext", `block ${block.value}`);
    place.setAttribute("aria-valuetext", `r = ${r}`);
    output.textContent = words;
    images.forEach((image, number) => {
      image.src = known.pictures[place.value][number][block.value - 1];
      image.alt = `Image ${number + 1}, ${words}`;
    });
  };
  block.addEventListener("input", show);
  place.addEventListener("input", show);
  show();
}
