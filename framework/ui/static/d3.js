// The parts of D3 that compute scales, ticks and shapes. Each adds itself to one global.

import "./vendor/d3-array.min.js";
import "./vendor/d3-color.min.js";
import "./vendor/d3-format.min.js";
import "./vendor/d3-interpolate.min.js";
import "./vendor/d3-time.min.js";
import "./vendor/d3-time-format.min.js";
import "./vendor/d3-scale.min.js";
import "./vendor/d3-path.min.js";
import "./vendor/d3-shape.min.js";

export const { area, bisectCenter, curveBasis, line, max, quantileSorted, rollups, scaleLinear, scaleLog, scaleTime } = globalThis.d3;
