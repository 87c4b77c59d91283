// Shows the entries that fit a pasted message best: by the words that both have.
const box = document.getElementById('message'), best = document.getElementById('best');
const words = (text) => text.toLowerCase().match(/[a-z_0-9]{2,}/g) ?? [];
const entries = [...document.querySelectorAll('.error')].map((node) => {
  const text = node.querySelector('code').textContent.replace(/\{[^}]*\}/g, ' ');
  return {node, own: words(text), all: new Set(words(node.textContent))};
});
const score = ({own, all}, given) =>
  [...given].filter((word) => all.has(word)).length / given.size +
  own.filter((word) => given.has(word)).length / (own.length || 1);
box.addEventListener('input', () => {
  const given = new Set(words(box.value));
  const ranked = entries.map((entry) => [score(entry, given), entry.node]).sort((a, b) => b[0] - a[0]);
  const fitting = given.size ? ranked.slice(0, 6).filter(([value]) => value > 0.5) : [];
  best.replaceChildren(...fitting.map(([, node]) => node.cloneNode(true)));
  best.querySelectorAll('[id]').forEach((node) => node.removeAttribute('id'));
  document.getElementById('matches').textContent = given.size ? `Fitting messages, the best first: ${fitting.length}` : '';
});
