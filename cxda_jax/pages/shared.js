"use strict";
// What the scripts of all pages share. All text goes through textContent.

const byId = (id) => document.getElementById(id);

function make(tag, { text, children = [], ...attributes } = {}) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

